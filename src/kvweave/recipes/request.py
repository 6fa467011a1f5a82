"""What the slots of a recipe hand to each other while one prompt is prefilled."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.attention import RowPlan
from kvweave.models.cache_base import PrefixContext
from kvweave.models.fused_cache import FusedCache
from kvweave.recipes.entries import StoreEntry
from kvweave.types import ChunkKV, KVProvenance, Origin, Plan, Span, Timing, TokenizedPrompt

FLOOR, CEILING = 0.02, 0.5  # shares of the stale rows between which a coverage budget stays
OBSERVED = "observed"  # the kind of KV that was made behind other chunks, exact there


@dataclass(frozen=True, slots=True)
class Budget:
    """How many stale context rows may be recomputed.

    `ratio` 0..1 of them, rounded up; or, with `coverage` 0..1, as few as hold that share of all scores, so that
    easy questions cost less than hard ones, but between FLOOR and CEILING of them.
    """

    ratio: float = 0.0
    coverage: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidRequest(f"ratio is {self.ratio}; it is a share of the context between 0 and 1")
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise InvalidRequest(f"coverage is {self.coverage}; it is a share of the scores between 0 and 1")

    @property
    def everything(self) -> bool:
        """Whether all context rows are computed, exact ones too."""
        return self.ratio == 1 and self.coverage is None

    @property
    def nothing(self) -> bool:
        """Whether no stale row may be computed, so that none needs a score."""
        return self.ratio == 0 and self.coverage is None

    def rows(self, stale: int) -> int:
        """At most so many of `stale` rows: k = ⌈ratio · stale⌉."""
        return _share(CEILING if self.coverage is not None else self.ratio, stale)

    def spend(self, scores: Tensor) -> int:
        """How many of the rows with these scores (n,) are recomputed; scores of a coverage are at least 0."""
        if self.coverage is None:
            return self.rows(scores.numel())
        shares = scores.sort(descending=True).values.cumsum(0)
        reached = int((shares < self.coverage * shares[-1:]).sum()) + 1 if scores.numel() else 0
        return min(max(reached, _share(FLOOR, scores.numel())), self.rows(scores.numel()))


def _share(ratio: float, rows: int) -> int:
    return math.ceil(round(ratio * rows, 9))  # 0.07 · 100 is a little over 7 in floating point


@dataclass(frozen=True)
class PrefillRequest:
    """One prompt, and what is at hand to prefill it: the model and the store of chunk KV.

    What is found in the store through `lease` is not evicted while the request runs. `prefix_context` is the text that the
    prompt stands behind; its system span is then whatever joins the two.
    """

    adapter: Adapter
    store: ChunkStore
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
        """The system prefix that stored KV of chunks was made behind."""
        return (
            self.prompt.ids(self.prompt.spans[0])
            if self.prefix_context is None
            else self.prefix_context.prefix
        )

    @cached_property
    def first_position(self) -> int:
        """The rotary position of the prompt's first token."""
        return 0 if self.prefix_context is None else int(self.prefix_context.positions(1))

    def plan(self, rows: Tensor) -> RowPlan:
        """Plain causal attention of prompt positions (T,), ascending, to all that stands before them."""
        return self.adapter.rows(rows) if self.prefix_context is None else self.prefix_context.plan(rows)

    def context(self, span: int) -> tuple[str, ...]:
        """Digests of what stands before a span: the exact path to it."""
        before = zip(self.prompt.spans[:span], self.digests[:span], strict=True)
        path = tuple(digest for part, digest in before if part.tokens)
        return path if self.prefix_context is None else (digest_tokens(self.prefix_context.token_ids), *path)

    @property
    def system_path(self) -> tuple[str, ...]:
        """The digest of the system prefix, if there is one: how every path begins."""
        return (digest_tokens(self.prefix),) if self.prefix else ()

    def chunks_before(self, span: int) -> tuple[str, ...]:
        """Digests of the prompt's chunks that stand before a span, in order."""
        before = zip(self.prompt.spans[:span], self.digests[:span], strict=True)
        return tuple(digest for part, digest in before if part.kind == "chunk" and part.tokens)

    def exact_provenance(self, span: int) -> KVProvenance:
        """How KV of this span must have been made to equal full attention's in this prompt."""
        regime = self.adapter.rope_regime(self.first_position + self.prompt.tokens)
        return KVProvenance(OBSERVED, self.context(span), exact=True, rope_regime=regime)

    def sources(self, span: int) -> tuple[str, ...]:
        """Digests of the chunks that KV of this span depends on: its own and those before it."""
        path = zip(self.prompt.spans[: span + 1], self.digests[: span + 1], strict=True)
        return tuple(digest for part, digest in path if part.kind == "chunk")


@dataclass(frozen=True, slots=True)
class Matched:
    """How one span of the prompt starts out, before selection.

    `kv` is None for fresh spans, `provenance` says which stored KV it is. `reason` is a sentence for people.
    """

    span: Span
    origin: Origin
    reason: str
    kv: ChunkKV | None = None
    provenance: KVProvenance | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prefilled prompt.

    `logits` (1, vocab) are those of the last prompt position. `kv_cache` holds K,V of every position, unless it has handed
    them over, and belongs to the caller. `selected` (k,) are the prompt positions that were selected for recomputation; no more than k
    of the stored ones were computed on the mean over the layers. `remembered` is what the store does not hold yet.
    """

    logits: Tensor
    plan: Plan
    timing: Timing
    kv_cache: FusedCache
    selected: Tensor
    remembered: tuple[StoreEntry, ...]
    request: PrefillRequest

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """Arguments for an ordinary `model.generate`; hands the canvas over, so use them for one call."""
        return self.request.adapter.generate_kwargs(self.kv_cache, self.request.prompt)
