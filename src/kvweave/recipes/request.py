"""What the slots of a recipe hand to each other while one prompt is prefilled."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvweave.core import ChunkKV, Making, Origin, Plan, Span, Timing, TokenizedPrompt
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.canvas import Canvas
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.keys import digest_tokens


@dataclass(frozen=True, slots=True)
class Budget:
    """How many stale context rows may be recomputed: `ratio` 0..1 of them, rounded up."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidRequest(f"ratio is {self.ratio}; it is a share of the context between 0 and 1")

    @property
    def everything(self) -> bool:
        """Whether all context rows are computed, exact ones too."""
        return self.ratio == 1

    def rows(self, stale: int) -> int:
        """k = ⌈ratio · stale⌉."""
        return math.ceil(round(self.ratio * stale, 9))  # 0.07 · 100 is a little over 7 in floating point


@dataclass(frozen=True)
class PrefillRequest:
    """One prompt, and what is at hand to prefill it: the model and the store of chunk KV."""

    adapter: Adapter
    store: ChunkStore
    prompt: TokenizedPrompt
    budget: Budget

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The token digest of each span, in order."""
        return tuple(digest_tokens(self.prompt.ids(span)) for span in self.prompt.spans)

    def context(self, span: int) -> tuple[str, ...]:
        """Digests of what stands before a span, the system prefix first: the exact path to it."""
        before = zip(self.prompt.spans[:span], self.digests[:span], strict=True)
        return tuple(digest for earlier, digest in before if earlier.tokens)

    def exact_making(self, span: int) -> Making:
        """How KV of this span must have been made to equal full attention's in this prompt."""
        regime = self.adapter.rope_regime(self.prompt.tokens)
        return Making("observed", self.context(span), exact=True, rope_regime=regime)

    def sources(self, span: int) -> tuple[str, ...]:
        """Digests of the chunks that KV of this span depends on: its own and those before it."""
        path = zip(self.prompt.spans[: span + 1], self.digests[: span + 1], strict=True)
        return tuple(digest for part, digest in path if part.kind == "chunk")


@dataclass(frozen=True, slots=True)
class Matched:
    """How one span of the prompt starts out, before selection.

    `kv` is None for fresh spans. `made_at` is the position it had in the pass that made it, in tokens.
    `reason` is a sentence for people.
    """

    span: Span
    origin: Origin
    reason: str
    kv: ChunkKV | None = None
    made_at: int = 0


@dataclass(frozen=True, slots=True)
class Remembered:
    """KV that a request computed and that is worth keeping."""

    kv: ChunkKV
    making: Making
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prefilled prompt.

    `logits` (1, vocab) are those of the last prompt position. `canvas` holds K,V of every position and
    belongs to the caller. `selected` (k,) are the prompt positions that were recomputed. `remembered` is
    what the store does not hold yet.
    """

    logits: Tensor
    plan: Plan
    timing: Timing
    canvas: Canvas
    selected: Tensor
    remembered: tuple[Remembered, ...]
    request: PrefillRequest

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """Arguments for an ordinary `model.generate`; hands the canvas over, so use them for one call."""
        return self.request.adapter.generate_kwargs(self.canvas, self.request.prompt)
