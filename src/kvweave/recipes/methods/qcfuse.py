"""QCFuse: the question read behind digests of the chunks says which of their tokens matter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.attention import LayerQueries
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.partial_layers import StopAtLayer
from kvweave.ops.scores import mean_attention
from kvweave.recipes.features import FeatureExtractor, Importance, digest_of, features_of
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState
from kvweave.types import ChunkFeature, ChunkKV


@dataclass(frozen=True, slots=True)
class AttentionBehindDigests:
    """Attention of the question's queries to every context key, the queries made behind the chunks' digests alone.

    The probe runs S ++ digests ++ question, every token at its own position; chunks without stored KV take part whole,
    since they have to be computed. In the chosen layers its queries are multiplied with the keys of all stored tokens;
    the softmax runs over everything that stands before; mean over heads, the rows that the user wrote, and layers.

    Sliding windows of the probe count the tokens that take part in it.

    Attributes:
        share: of a chunk's tokens that its digest holds, the first four beside it; 0 leaves the chunks out, 1 takes them
            whole. A chunk whose digest is not stored takes part whole.
        layers: negative ones from the last; None for the model's critical layers.
    """

    share: float = 0.12
    layers: tuple[int, ...] | None = None
    importance: Importance = field(default_factory=Importance)
    adds_up: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Importances, unless every chunk or none takes part whole."""
        return (self.importance,) if 0 < self.share < 1 else ()

    def scores(self, state: PrefillState) -> Tensor:
        """One pass over question and fresh chunks, which ends at the last of the chosen layers.

        No layer behind that is read of stored chunks.
        """
        adapter = state.request.adapter
        layers = adapter.critical_layers if self.layers is None else self.layers
        kept = _Kept(frozenset(layer % adapter.geometry.layers for layer in layers))
        rows = self._probe(state, kept)
        asked = torch.searchsorted(rows, state.asked)
        found = [_attention(state, seen, rows, asked) for seen in kept.seen]
        return torch.stack(found).mean(dim=0).cpu()[state.stale]

    def _probe(self, state: PrefillState, kept: "_Kept") -> Tensor:
        """Run it; returns the prompt positions that took part, ascending."""
        adapter, prompt = state.request.adapter, state.request.prompt
        spans: list[PlacedSpan] = []
        rows: list[Tensor] = []
        start, first = 0, state.request.first_position
        for found, inside in zip(state.matched, self._taking_part(state), strict=True):
            if found.kv is not None:
                spans.append(PlacedSpan(_part(found.kv, inside), start, first + found.span.start, inside))
            rows.append(found.span.start + inside)
            start += inside.numel()
        positions = torch.cat(rows)
        kv_cache = adapter.new_cache(positions.numel(), spans, first + positions)
        plan = adapter.rows(torch.searchsorted(positions, state.fresh))
        plan.hooks += [kept, StopAtLayer(max(kept.layers))]
        adapter.look(kv_cache, [prompt.token_ids[row] for row in positions], plan)
        return positions

    def _taking_part(self, state: PrefillState) -> list[Tensor]:
        """Which tokens of each span are in the probe, as offsets in it."""
        inside = [torch.arange(m.span.tokens) for m in state.matched]
        stored = [n for n, m in enumerate(state.matched) if m.span.kind == "chunk" and m.kv is not None]
        if self.share == 0:
            return [part[:0] if number in stored else part for number, part in enumerate(inside)]
        for number, feature in zip(stored, self._notes(state, stored), strict=True):
            if feature is not None:
                inside[number] = digest_of(feature.tensors["importance"], self.share)
        return inside

    def _notes(self, state: PrefillState, spans: Sequence[int]) -> list[ChunkFeature | None]:
        if not self.extractors:
            return [None] * len(spans)
        prompt = state.request.prompt
        chunks = [prompt.ids(prompt.spans[number]) for number in spans]
        return features_of(self.importance, state.request, chunks)


class _Kept:
    """Keeps what chosen layers of a pass attend with."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.seen: list[LayerQueries] = []

    def see(self, queries: LayerQueries) -> None:
        if queries.layer in self.layers:
            self.seen.append(queries)


class _Picked:
    """Some tokens of a chunk's KV; of the stored tensors only those layers are read that are asked for. See `KVLayers`."""

    def __init__(self, kv: ChunkKV, tokens: Tensor) -> None:
        self._kv, self._tokens = kv, tokens

    @property
    def shape(self) -> tuple[int, ...]:
        layers, two, heads, _, width = self._kv.held.shape
        return layers, two, heads, self._tokens.numel(), width

    @property
    def dtype(self) -> torch.dtype:
        return self._kv.held.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def awaited_s(self) -> float:
        return self._kv.awaited_s

    def load(self, index: int) -> None:
        self._kv.load(index)

    def layer(self, index: int) -> Tensor:
        return self._kv.layer(index)[:, :, self._tokens]

    def whole(self) -> Tensor:
        return self._kv.kv[:, :, :, self._tokens]


def _part(kv: ChunkKV, tokens: Tensor) -> ChunkKV:
    """Some of a chunk's tokens; what is stored itself where that is all of them."""
    if tokens.numel() == kv.tokens:
        return kv
    return ChunkKV(tuple(kv.token_ids[i] for i in tokens), _Picked(kv, tokens))


def _attention(state: PrefillState, seen: LayerQueries, rows: Tensor, asked: Tensor) -> Tensor:
    """One layer's attention of the asked rows to all prompt positions, (N,); `rows` are the positions of the probe's."""
    device = seen.query.device
    computed = torch.searchsorted(rows, state.fresh).to(device)
    keys = state.kv_cache.held_keys(seen.layer, seen.keys).clone()  # (1, G, N, D)
    keys[:, :, state.fresh.to(device)] = seen.keys[:, :, computed]
    places = torch.searchsorted(seen.rows, asked.to(device))
    return mean_attention(
        seen.query[:, :, places],
        state.asked.to(device),
        keys,
        scaling=seen.scaling,
        window=seen.window,
        softcap=seen.softcap,
    )[0]


def qcfuse() -> Recipe:
    """Read the question behind digests of the chunks, select by its attention in the model's critical layers.

    Paper: QCFuse (arXiv 2606.05875), from its public description; the digest's score is KVzip's.
    Idea: a tenth of a chunk's tokens tells the question what the chunk is about, and few layers tell where it looks, so
        that most stored KV need not be there before the recomputation starts.
    Parameters: digests of 12 % and four tokens more; the layers that `kvweave profile-layers` found, else the three in the
        middle; ratio 0.15 (the paper's default is 0.5).
    Differs from the paper: digests are made one chunk at a time, behind the system prefix, and without the instruction to
        repeat that KVzip puts before the repetition.
    Relations: with a share of 0 close to `fusionrag`, with 1 and all layers to `prophetkv`, whose softmax leaves the system
        prefix out.
    Measured: see the methods page.
    """
    return Recipe("qcfuse", match=MatchPathThenChunk(), select=Highest(AttentionBehindDigests()), ratio=0.15)
