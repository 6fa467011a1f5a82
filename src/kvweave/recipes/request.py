"""What a prefill begins and ends with: the request, the stored KV found for its spans, and the result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.attention import RowPlan
from kvweave.models.cache_base import PrefixContext
from kvweave.models.engine import Engine
from kvweave.models.fused_cache import FusedCache
from kvweave.recipes.context import StoreEntry
from kvweave.recipes.features import FeatureExtractor
from kvweave.results import Plan, SpanOrigin, Timing
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, Span, TokenizedPrompt

FLOOR, CEILING = 0.02, 0.5  # a coverage budget recomputes at least and at most these shares of the stale rows
OBSERVED = "observed"  # the kind of exact KV that a pass over a whole prompt computed after other chunks


@dataclass(frozen=True, slots=True)
class Budget:
    """How many stale context rows may be recomputed.

    With `ratio` 0..1: that share of them, rounded up. With `coverage` 0..1: as few rows as hold that share of all
    scores, between FLOOR and CEILING of the stale rows, so that easy questions cost less than hard ones.
    """

    ratio: float = 0.0
    coverage: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidRequest(f"ratio is {self.ratio}; it is a share of the context between 0 and 1")
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise InvalidRequest(f"coverage is {self.coverage}; it is a share of the scores between 0 and 1")

    @property
    def recomputes_all(self) -> bool:
        """Whether all context rows are computed, exact ones too."""
        return self.ratio == 1 and self.coverage is None

    @property
    def recomputes_none(self) -> bool:
        """Whether no stale row may be recomputed, so that no row needs a score."""
        return self.ratio == 0 and self.coverage is None

    def max_rows(self, stale: int) -> int:
        """Return the most rows that may be recomputed of `stale` rows: k = ⌈ratio · stale⌉."""
        return _share(CEILING if self.coverage is not None else self.ratio, stale)

    def row_count(self, scores: Tensor) -> int:
        """Return how many of the rows with these scores (n,) to recompute; a coverage needs scores of at least 0."""
        if self.coverage is None:
            return self.max_rows(scores.numel())
        shares = scores.sort(descending=True).values.cumsum(0)
        reached = int((shares < self.coverage * shares[-1:]).sum()) + 1 if scores.numel() else 0
        return min(max(reached, _share(FLOOR, scores.numel())), self.max_rows(scores.numel()))


def _share(ratio: float, rows: int) -> int:
    return math.ceil(round(ratio * rows, 9))  # 0.07 · 100 is a little over 7 in floating point


@dataclass(frozen=True)
class PrefillRequest:
    """One prompt with the model and the store that prefill it.

    Entries found through `lease` are not evicted while the request runs. `prefix_context` is text before the prompt, such as
    earlier turns; the prompt's system span then holds the tokens that join the two.
    """

    adapter: Engine
    store: KVStore
    prompt: TokenizedPrompt
    budget: Budget
    lease: Lease | None = None
    prefix_context: PrefixContext | None = None

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The token digest of each span, in order."""
        return tuple(digest_tokens(self.prompt.ids(span)) for span in self.prompt.spans)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The token ids of the system prefix, after which stored chunk KV was computed."""
        if self.prefix_context is not None:
            return self.prefix_context.prefix
        return self.prompt.ids(self.prompt.spans[0])

    @cached_property
    def first_position(self) -> int:
        """The rotary position of the prompt's first token."""
        return 0 if self.prefix_context is None else int(self.prefix_context.positions(1))

    def plan(self, rows: Tensor) -> RowPlan:
        """Return plain causal attention of prompt positions (T,), ascending, to everything before them."""
        return self.adapter.rows(rows) if self.prefix_context is None else self.prefix_context.plan(rows)

    def context(self, span: int) -> tuple[str, ...]:
        """Return the digests of everything before a span: the exact path to it."""
        before = zip(self.prompt.spans[:span], self.digests[:span], strict=True)
        path = tuple(digest for part, digest in before if part.tokens)
        return path if self.prefix_context is None else (digest_tokens(self.prefix_context.token_ids), *path)

    @property
    def system_path(self) -> tuple[str, ...]:
        """The digest of the system prefix, with which every path begins; empty without a prefix."""
        return (digest_tokens(self.prefix),) if self.prefix else ()

    def chunks_before(self, span: int) -> tuple[str, ...]:
        """Return the digests of the prompt's chunks before a span, in order."""
        before = zip(self.prompt.spans[:span], self.digests[:span], strict=True)
        return tuple(digest for part, digest in before if part.kind == "chunk" and part.tokens)

    def features(
        self, extractor: FeatureExtractor, chunks: Sequence[tuple[int, ...]]
    ) -> list[ChunkFeature | None]:
        """Look up the features of chunks after the system prefix; None where none is stored."""
        wanted = [(ids, extractor.provenance(self.adapter, self.prefix, len(ids))) for ids in chunks]
        return self.store.find_features(self.adapter.fingerprint, wanted)

    def exact_provenance(self, span: int) -> KVProvenance:
        """Return the provenance of KV of this span that equals full attention's in this prompt."""
        regime = self.adapter.rope_regime(self.first_position + self.prompt.tokens)
        return KVProvenance(OBSERVED, self.context(span), exact=True, rope_regime=regime)

    def sources(self, span: int) -> tuple[str, ...]:
        """Return the digests of the chunks that KV of this span depends on: its own and those before it."""
        path = zip(self.prompt.spans[: span + 1], self.digests[: span + 1], strict=True)
        return tuple(digest for part, digest in path if part.kind == "chunk")


@dataclass(frozen=True, slots=True)
class Matched:
    """The stored KV found for one span of the prompt, before selection.

    `kv` is None for fresh spans, `provenance` says which stored KV it is. `reason` is a sentence for people.
    """

    span: Span
    origin: SpanOrigin
    reason: str
    kv: ChunkKV | None = None
    provenance: KVProvenance | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prefilled prompt.

    Attributes:
        logits: (1, vocab), of the last prompt position.
        kv_cache: K,V of every position, owned by the caller; empty if a sink received the layers.
        selected: (k,) prompt positions selected for recomputation. On average over the layers, at most k stored
            rows were computed.
        new_entries: what the store does not hold yet and is worth storing; see `remember`.
        scores: the prompt positions (n,) that were rated for recomputation and their scores (n,), where the recipe has any.
    """

    logits: Tensor
    plan: Plan
    timing: Timing
    kv_cache: FusedCache
    selected: Tensor
    new_entries: tuple[StoreEntry, ...]
    request: PrefillRequest
    scores: tuple[Tensor, Tensor] | None = None

    @property
    def adapter(self) -> Adapter:
        """The adapter that prefilled the prompt, to generate with."""
        assert isinstance(self.request.adapter, Adapter)  # `run` takes no other engine
        return self.request.adapter

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """Arguments for one call of `model.generate`, which uses the KV cache up."""
        return self.adapter.generate_kwargs(self.kv_cache, self.request.prompt)
