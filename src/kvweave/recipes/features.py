"""How much each token of a chunk depends on what stands before the chunk, found out before any question comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import PeakAttention
from kvweave.ops.scores import top_tokens
from kvweave.recipes.context import Corpus, Ids, PrepareContext
from kvweave.recipes.entries import StoreEntry
from kvweave.recipes.prepare import Isolated, Similar, WithNeighbours, feature_bytes, isolated_kv, kv_behind
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.state import PrefillState
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance


class FeatureExtractor(Protocol):
    """Makes a note about each of several chunks at once, since what is recorded may lie between them."""

    @property
    def together(self) -> bool:
        """Whether it does, so that a note about a chunk depends on which others it is made with."""
        ...

    def provenance(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """What names the note about a chunk of this length behind a system prefix."""
        ...

    def make(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Look at different chunks; yields their notes, and whatever else the looking left that is worth keeping.

        Stores none of it. A chunk about which nothing can be said among the chunks that there are gets no note, and is
        asked about again among others.
        """
        ...

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """About how much of the store what is yielded about a chunk of this length takes."""
        ...


def features_of(
    extractor: FeatureExtractor, request: PrefillRequest, chunks: Sequence[Ids]
) -> list[ChunkFeature | None]:
    """What was recorded of each chunk behind the request's system prefix, in one look-up; None where nothing was."""
    wanted = [(ids, extractor.provenance(request.adapter, request.prefix, len(ids))) for ids in chunks]
    return request.store.find_features(request.adapter.fingerprint, wanted)


def placeholder(provenance: KVProvenance, corpus: Corpus) -> KVProvenance:
    """What names the empty note on a chunk about which a record of this making says nothing among a corpus' chunks."""
    return replace(provenance, kind=f"{provenance.kind}-unsaid", context=(*provenance.context, corpus.digest))


@dataclass(frozen=True, slots=True)
class ContextSensitivity:
    """How far each token's KV moves when other chunks are put before its chunk: a note, `moved` (n,) float32.

    The distance between KV computed behind `neighbours` and isolated KV, as a share of the latter's length, on the mean
    over layers, keys (before rotation) and values. Both are as they were computed, however KV is stored: what coding a
    chunk's own KV loses is no movement, and the neighbours stand there as they are stored. A token that says the same behind any text hardly moves; one that
    takes its meaning from earlier text, as what follows a pronoun does, moves even behind the wrong text. A chunk
    before which no neighbour stands, since there is none or none fits the model's context, gets no note.
    """

    neighbours: WithNeighbours = field(default_factory=Similar)
    together: ClassVar[bool] = False

    def provenance(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Behind the system prefix, named after the neighbours."""
        behind, isolated = self.neighbours.provenances(adapter, prefix, chunk_tokens)
        return KVProvenance(f"moved-{behind.kind}", isolated.context, rope_regime=isolated.rope_regime)

    def make(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """One pass over each chunk behind its neighbours' isolated KV; what comes out is measured and not kept."""
        for chunk in chunks:
            standing = self.neighbours.standing(ctx, chunk)
            if standing:
                alone, made = _alone(ctx, chunk), kv_behind(ctx, standing, chunk)
                feature = ChunkFeature(chunk, {"moved": _distance(made.kv, alone)})
                yield StoreEntry(feature, self.provenance(ctx.adapter, ctx.prefix, len(chunk)), made.sources)

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """One number for each token."""
        return feature_bytes(chunk_tokens)

    def of_stale(self, state: PrefillState) -> Tensor:
        """(n,) float32: how far each stale token moves, from the notes of its chunk.

        A chunk without a note counts as if all its tokens moved as far as those of the other chunks do on the mean.
        """
        request = state.request
        chunks = [request.prompt.ids(found.span) for found in state.matched if found.origin == "reused"]
        features = features_of(self, request, chunks)
        known = [feature.tensors["moved"] for feature in features if feature is not None]
        mean = torch.cat(known).mean() if known else torch.ones(())
        found = [
            mean.expand(len(ids)) if feature is None else feature.tensors["moved"]
            for ids, feature in zip(chunks, features, strict=True)
        ]
        return torch.cat(found)


def _alone(ctx: PrepareContext, chunk: Ids) -> ChunkKV:
    """A chunk's isolated KV; computed again, and not stored, where what is stored is coded."""
    return isolated_kv(ctx, chunk) if ctx.storage == "exact" else Isolated().make(ctx, chunk).kv


def _distance(kv: ChunkKV, plain: ChunkKV) -> Tensor:
    """(n,) float32, from KV (L, 2, G, n, D) of the same tokens."""
    off = (kv.kv.float() - plain.kv.float()).square().sum(dim=(2, 4))  # (L, 2, n)
    length = plain.kv.float().square().sum(dim=(2, 4)).clamp(min=1e-9)
    return (off / length).sqrt().mean(dim=(0, 1)).cpu()


SINKS = 4


@dataclass(frozen=True, slots=True)
class Importance:
    """The largest attention that a token of a chunk gets while the chunk is repeated, over heads, layers and repeated rows.

    The model runs over S ++ C ++ C; the second C, as much of it as fits the model's context, is what attends.
    KVzip asks the model in words to repeat the context before it does; here the repetition follows at once, since small
    models and other languages have no use for the words. A chunk that leaves the model no room to repeat anything has
    no importance anywhere.
    """

    together: ClassVar[bool] = False

    def provenance(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Behind the system prefix, as isolated KV."""
        (isolated,) = Isolated().provenances(adapter, prefix, chunk_tokens)
        return KVProvenance("importance", isolated.context, rope_regime=isolated.rope_regime)

    def make(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """One pass over each chunk, two over those whose isolated KV is not stored."""
        for chunk in chunks:
            feature = ChunkFeature(chunk, {"importance": _importance(ctx, chunk)})
            yield StoreEntry(
                feature, self.provenance(ctx.adapter, ctx.prefix, len(chunk)), (digest_tokens(chunk),)
            )

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """One number for each token."""
        return feature_bytes(chunk_tokens)


def _importance(ctx: PrepareContext, chunk: Ids) -> Tensor:
    """(n,) float32."""
    adapter, start = ctx.adapter, len(ctx.prefix)
    end = start + len(chunk)
    ids = (*ctx.prefix, *chunk, *chunk)[: adapter.geometry.context_tokens]
    if len(ids) <= end:
        return torch.zeros(len(chunk))
    isolated = Isolated()
    (provenance,) = isolated.provenances(adapter, ctx.prefix, len(chunk))
    kv = ctx.store.get(adapter.fingerprint, chunk, provenance) or isolated.make(ctx, chunk).kv
    before = [PlacedSpan(ctx.prefix_kv(), 0, 0)] if start else []
    plan = adapter.rows(torch.arange(end, len(ids)))
    peak = PeakAttention()
    plan.hooks.append(peak)
    adapter.compute(adapter.new_cache(len(ids), [*before, PlacedSpan(kv, start, start)]), ids, plan)
    return peak.weights[start:end].cpu()


def digest_of(importance: Tensor, share: float) -> Tensor:
    """Which of a chunk's n tokens are its digest, ascending: ⌈share · n⌉ of the highest importance (n,), and its first.

    The first SINKS tokens are those that attention rests on whatever it looks for.
    """
    kept = top_tokens(importance, Budget(share).rows(importance.numel()))
    kept[:SINKS] = True
    return kept.nonzero()[:, 0]
