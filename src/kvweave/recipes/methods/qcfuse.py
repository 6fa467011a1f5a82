"""QCFuse: the question, read after short digests of the chunks, selects tokens by its attention to their full KV."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.engine import Engine
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import LayerQueries, PeakAttention, StopAtLayer
from kvweave.ops.scores import mean_attention, top_tokens
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Isolated, isolated_provenance
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Budget
from kvweave.recipes.select import LayerVotes, Score, TopScores, question_votes, voting_layers
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance

SINKS = 4
"""First tokens of every digest: they get attention whatever is asked."""


def qcfuse() -> Recipe:
    """Read the question after digests of the chunks, select by its attention in the model's critical layers.

    Paper: QCFuse (arXiv 2606.05875), from its public description; the digest's score is KVzip's (arXiv
        2505.23416).
    Idea: a tenth of a chunk's tokens tells the question what the chunk is about, and few layers show where the question looks.
        So most stored KV is not needed before the recomputation starts.
    Parameters: digests of 12 % and four tokens more; the layers that `kvweave profile-layers` found, else the three in the
        middle; ratio 0.15 (the paper's default is 0.5).
    Differs from the paper: digests are computed one chunk at a time, after the system prefix, and without the instruction to
        repeat that KVzip puts before the repetition.
    Relations: with a share of 0 close to `fusionrag-alone`; with a share of 1 and all layers close to `prophetkv`, whose softmax
        leaves the system prefix out.
    """
    return Recipe("qcfuse", select=TopScores(DigestAttention()), ratio=0.15)


@dataclass(frozen=True, slots=True)
class Importance(FeatureExtractor):
    """The largest attention that a token of a chunk gets while the chunk is repeated, over heads, layers and repeated rows.

    The model runs over S ++ C ++ C. The second C attends, or as much of it as fits the model's context. Layers count that
    see all of the first C then (`LayerVotes`), so that a chunk's end does not win by being near. KVzip first asks
    the model in words to repeat the context. Here the repetition follows at once, since small models and other languages
    do not benefit from the words. Without room for any repetition the importance is 0 everywhere.
    """

    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return the provenance after the system prefix, as that of isolated KV."""
        end = min(len(prefix) + 2 * chunk_tokens, adapter.geometry.context_tokens)
        votes = voting_layers(adapter.geometry, len(prefix), end - 1)
        every = len(votes.layers) == adapter.geometry.layers and not votes.lift_windows
        # Until layers were left out, entries named `importance` were the peak over all layers, whatever they see.
        kind = "importance" if every else "importance-whole"
        return replace(isolated_provenance(adapter, prefix, chunk_tokens), kind=kind)

    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Run one pass over each chunk, or two if its isolated KV is not stored."""
        for chunk in chunks:
            feature = ChunkFeature(chunk, {"importance": _importance(ctx, chunk)})
            provenance = self.provenance(ctx.adapter, ctx.prefix, len(chunk))
            yield StoreEntry(feature, provenance, (digest_tokens(chunk),))


def _importance(ctx: PrepareContext, chunk: Ids) -> Tensor:
    """Return (n,) float32."""
    adapter, start = ctx.adapter, len(ctx.prefix)
    end = start + len(chunk)
    ids = (*ctx.prefix, *chunk, *chunk)[: adapter.geometry.context_tokens]
    if len(ids) <= end:
        return torch.zeros(len(chunk))
    provenance = isolated_provenance(adapter, ctx.prefix, len(chunk))
    kv = ctx.store.get(adapter.fingerprint, chunk, provenance) or Isolated().compute(ctx, chunk).kv
    before = [PlacedSpan(ctx.prefix_kv(), 0, 0)] if start else []
    plan = adapter.rows(torch.arange(end, len(ids)))
    votes = voting_layers(adapter.geometry, start, len(ids) - 1)
    peak = PeakAttention(layers=votes.layers, lift_windows=votes.lift_windows)
    plan.hooks += [peak, StopAtLayer(votes.layers[-1])]
    adapter.run_partial(adapter.new_cache(len(ids), [*before, PlacedSpan(kv, start, start)]), ids, plan)
    return peak.weights[start:end].cpu()


@dataclass(frozen=True, slots=True)
class DigestAttention(Score):
    """Attention of the question's queries to every context key, with queries computed after the chunks' digests alone.

    The probe runs S ++ digests ++ question, every token at its own position; chunks without stored KV take part whole, since
    they have to be computed. In the chosen layers its queries are multiplied with the keys of all stored tokens. The
    softmax runs over everything before a row. The result is averaged over heads, the rows that the user wrote, and
    layers. Sliding windows of the probe count the tokens that take part in it. Of the chosen layers, those count that see the
    whole context (`LayerVotes`).

    Attributes:
        share: share of a chunk's tokens in its digest, beside its first four; 0 leaves the chunks out, 1 takes them whole. A
            chunk whose digest is not stored takes part whole.
        layers: negative ones count from the last; None for the model's critical layers.
        importance: the feature that digests are made from.
    """

    share: float = 0.12
    layers: tuple[int, ...] | None = None
    importance: Importance = field(default_factory=Importance)
    supports_coverage: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Importances, unless all chunks take part whole or not at all."""
        return (self.importance,) if 0 < self.share < 1 else ()

    def scores(self, state: PrefillState) -> Tensor:
        """Run one pass over question and fresh chunks up to the last of the chosen layers.

        Later layers of stored chunks are not read.
        """
        adapter = state.request.adapter
        votes = question_votes(state, adapter.critical_layers if self.layers is None else self.layers)
        recorder = _QueryRecorder(votes)
        rows = self._probe(state, recorder)
        question = torch.searchsorted(rows, state.question_rows)
        window = votes.lifted_window
        stored = state.kv_cache if window is None else state.cache_within_window(window)
        found = [_attention(state, stored, queries, rows, question) for queries in recorder.seen]
        return torch.stack(found).mean(dim=0).cpu()[state.stale]

    def _probe(self, state: PrefillState, recorder: "_QueryRecorder") -> Tensor:
        """Run the probe; return the prompt positions that took part, ascending."""
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
        plan.hooks += [recorder, StopAtLayer(recorder.votes.layers[-1])]
        adapter.run_partial(kv_cache, [prompt.token_ids[row] for row in positions], plan)
        return positions

    def _taking_part(self, state: PrefillState) -> list[Tensor]:
        """Return which tokens of each span are in the probe, as offsets in the span."""
        inside = [torch.arange(m.span.tokens) for m in state.matched]
        stored = [n for n, m in enumerate(state.matched) if m.span.kind == "chunk" and m.kv is not None]
        if self.share == 0:
            return [part[:0] if number in stored else part for number, part in enumerate(inside)]
        for number, feature in zip(stored, self._importances(state, stored), strict=True):
            if feature is not None:
                inside[number] = _digest(feature.tensors["importance"], self.share)
        return inside

    def _importances(self, state: PrefillState, spans: Sequence[int]) -> list[ChunkFeature | None]:
        if not self.extractors:
            return [None] * len(spans)
        prompt = state.request.prompt
        chunks = [prompt.ids(prompt.spans[number]) for number in spans]
        return state.request.features(self.importance, chunks)


def _digest(importance: Tensor, share: float) -> Tensor:
    """Return which of a chunk's n tokens are its digest, ascending.

    These are the ⌈share · n⌉ tokens of the highest importance (n,) and the first SINKS tokens.
    """
    kept = top_tokens(importance, Budget(share).max_rows(importance.numel()))
    kept[:SINKS] = True
    return kept.nonzero()[:, 0]


class _QueryRecorder:
    """Records what the layers that count attend with; without a window where it is lifted."""

    def __init__(self, votes: LayerVotes) -> None:
        self.votes = votes
        self.seen: list[LayerQueries] = []

    def on_layer(self, queries: LayerQueries) -> None:
        if queries.layer in self.votes.layers:
            settings = queries.settings
            if self.votes.lift_windows:
                settings = replace(settings, window=None)
            self.seen.append(replace(queries, settings=settings))


def _attention(
    state: PrefillState, stored: FusedCache, seen: LayerQueries, rows: Tensor, question: Tensor
) -> Tensor:
    """Return one layer's attention of the question to all prompt positions, (N,).

    `stored` holds the placed KV, `rows` are the prompt positions of the probe, `question` the places of the question's rows among them.
    """
    device = seen.query.device
    computed = torch.searchsorted(rows, state.fresh).to(device)
    keys = stored.layer_kv(seen.layer, seen.keys)[0].clone()  # (1, G, N, D)
    keys[:, :, state.fresh.to(device)] = seen.keys[:, :, computed]
    places = torch.searchsorted(seen.rows, question.to(device))
    return mean_attention(
        seen.query[:, :, places],
        state.question_rows.to(device),
        keys,
        seen.settings,
    )[0]


def _part(kv: ChunkKV, tokens: Tensor) -> ChunkKV:
    """Return some of a chunk's tokens; the chunk itself if these are all."""
    if tokens.numel() == kv.tokens:
        return kv
    return ChunkKV(tuple(kv.token_ids[i] for i in tokens), _SomeTokens(kv, tokens))


class _SomeTokens:
    """Some tokens of a chunk's KV, as `KVLayers`; reads only the layers that are asked for."""

    def __init__(self, kv: ChunkKV, tokens: Tensor) -> None:
        self._kv, self._tokens = kv, tokens

    @property
    def shape(self) -> tuple[int, ...]:
        layers, two, heads, _, width = self._kv.data.shape
        return layers, two, heads, self._tokens.numel(), width

    @property
    def dtype(self) -> torch.dtype:
        return self._kv.data.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def layer_wait_s(self) -> float:
        return self._kv.layer_wait_s

    def load(self, index: int) -> None:
        self._kv.load(index)

    def layer(self, index: int) -> Tensor:
        return self._kv.layer(index)[:, :, self._tokens]

    def all_layers(self) -> Tensor:
        return self._kv.kv[:, :, :, self._tokens]
