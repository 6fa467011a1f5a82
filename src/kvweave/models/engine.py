"""What recipes need of an engine that runs the model, whichever it is.

`Adapter` runs transformers in this process. Another engine, with pages of its own for KV, places stored KV there and runs
its own model. Selectors and preparations work with both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvweave.cancellation import check_cancelled
from kvweave.models.attention import RowPlan
from kvweave.models.fused_cache import FusedCache, PlacedSpan, check_positions, rope_positions
from kvweave.models.hooks import StopAtLayer, StopForward
from kvweave.models.prompt import PromptTemplate, check_length
from kvweave.models.rotary import KeyRotation, PlacedRotation
from kvweave.models.support import Geometry
from kvweave.types import ChunkKV, ModelFingerprint


class Engine(ABC):
    """Runs chosen rows of a prompt over placed KV.

    Attributes:
        geometry: the shapes of the model's KV.
        rotation: rotates stored keys.
        template: renders prompts for the model's tokenizer.
        critical_layers: the layers whose attention best predicts what decoding attends to; at first the middle ones.
    """

    geometry: Geometry
    rotation: KeyRotation
    template: PromptTemplate
    critical_layers: tuple[int, ...]

    @property
    @abstractmethod
    def fingerprint(self) -> ModelFingerprint:
        """Names the weights and everything else that stored KV depends on."""

    @abstractmethod
    def rope_regime(self, prompt_tokens: int) -> str:
        """Name the frequency scaling that a pass of this length uses; "fixed" if it never changes."""

    def new_cache(
        self,
        length: int,
        spans: Sequence[PlacedSpan] = (),
        positions: Tensor | None = None,
        *,
        share: bool = True,
    ) -> FusedCache:
        """Return a cache over `length` prompt positions with stored spans placed in it.

        `positions` (length,) are the rotary positions of all prompt tokens, if these are not 0 … length − 1. The last must
        be the largest, since generated tokens continue from it. Without `share` the request has a copy of the spans of its own,
        also where requests share them. Raises InvalidRequest if the last is not the largest, and for spans that overlap.
        """
        device = self.geometry.device
        positions = torch.arange(length) if positions is None else positions
        check_positions(positions, length)
        rope_length = int(positions[-1]) + 1 if length else 0
        placed = tuple(sorted((span for span in spans if span.kv.tokens), key=lambda span: span.start))
        like = torch.empty(0, dtype=self.geometry.dtype, device=device)
        angles = self.rotation.angles(rope_positions(placed).to(device), rope_length, like)
        return self._cache_of(length, placed, angles, positions.to(device), share=share)

    @abstractmethod
    def _cache_of(
        self,
        length: int,
        placed: tuple[PlacedSpan, ...],
        angles: PlacedRotation,
        positions: Tensor,
        *,
        share: bool,
    ) -> FusedCache:
        """Return the engine's cache; arguments as for `FusedCache`, `share` as for `new_cache`."""

    @abstractmethod
    def compute(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: RowPlan,
        *,
        capture: bool = False,
        unrotated: bool = False,
    ) -> Tensor:
        """Run the model over the prompt positions `plan.rows` (T,) and return the logits of the last row, (1, vocab).

        Writes their K,V into the cache. Every row attends to all cache positions up to its own. `token_ids` are all of the
        prompt's, (N,). With `capture`, `kv_cache.capture.kv` afterwards holds the rows' unrotated K and V. With `unrotated`, hooks
        find those of their layer in `kv_cache.capture.layer_kv`.
        """

    @property
    def stops_early(self) -> bool:
        """Whether a pass that a hook ends costs less than a whole one; by default so."""
        return True

    def rows(self, rows: Tensor) -> RowPlan:
        """Return a plan for plain causal attention of these prompt positions (T,), ascending."""
        return RowPlan(rows.to(self.geometry.device), self.geometry.dtype)

    def encode(self, token_ids: Sequence[int], *before: ChunkKV) -> ChunkKV:
        """Prefill a chunk after stored KV, in the given order, and return the chunk's KV alone, keys unrotated.

        After the system prompt's KV this is the `isolated` preparation (FusionRAG eq. 5), after nothing `bare`
        (CacheClip §2.3), after the system prompt and other chunks `similar` (FusionRAG eq. 10).
        """
        if not token_ids:
            return self.empty_kv()
        ids: tuple[int, ...] = ()
        spans = []
        for kv in before:
            spans.append(PlacedSpan(kv, len(ids), len(ids)))
            ids += kv.token_ids
        start, ids = len(ids), (*ids, *token_ids)
        self.check_length(len(ids))
        kv_cache = self.new_cache(len(ids), spans)
        plan = self.rows(torch.arange(start, len(ids)))
        if self.stops_early:
            plan.hooks.append(StopAtLayer(self.geometry.layers - 1))  # the logits are not needed
        with suppress(StopForward):
            self.compute(kv_cache, ids, plan, capture=True)
        return self.extract_chunk_kv(kv_cache, ids, start, len(ids))

    def extract_chunk_kv(
        self, kv_cache: FusedCache, token_ids: Sequence[int], start: int, end: int
    ) -> ChunkKV:
        """Return a copy of the KV of prompt positions `start:end` from the last capturing pass."""
        assert kv_cache.capture is not None
        assert kv_cache.capture.kv is not None
        kv = kv_cache.capture.kv[:, :, :, start:end].contiguous().cpu()
        return ChunkKV(tuple(token_ids[start:end]), kv)

    def empty_kv(self) -> ChunkKV:
        """Return the KV of no tokens."""
        g = self.geometry
        return ChunkKV((), torch.empty(g.layers, 2, g.kv_heads, 0, g.head_width, dtype=g.dtype))

    def run_partial(self, kv_cache: FusedCache, token_ids: Sequence[int], plan: RowPlan) -> None:
        """Run a pass as `compute` does, for its hooks alone; it ends where one raises StopForward.

        The rows of the layers that ran, the last one included, are in the cache. Raises Cancelled.
        """
        check_cancelled()
        with suppress(StopForward):
            self.compute(kv_cache, token_ids, plan)

    def check_length(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Raise PromptTooLong if prompt and answer do not fit the model's context; the message says by how much."""
        check_length(self.geometry.context_tokens, self.fingerprint.name, prompt_tokens, new_tokens)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so that a clock read afterwards is right."""
        if self.geometry.device.type == "cuda":
            torch.cuda.synchronize(self.geometry.device)
