"""How much each token of a chunk depends on what stands before the chunk, found out before any question comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import PeakAttention
from kvweave.ops.scores import top_tokens
from kvweave.recipes.assembled import Assembled
from kvweave.recipes.chunk_features import notes_about
from kvweave.recipes.context import Ids, Workshop
from kvweave.recipes.entries import Kept
from kvweave.recipes.prepare import Behind, Isolated, Similar, isolated_kv, kv_behind, note_bytes
from kvweave.recipes.state import Budget
from kvweave.types import ChunkKV, ChunkNote, Making


@dataclass(frozen=True, slots=True)
class Moved:
    """How far each token's KV moves when other chunks are put before its chunk: a note, `moved` (n,) float32.

    The distance between KV computed behind `neighbours` and isolated KV, as a share of the latter's length, on the mean
    over layers, keys (before rotation) and values. Both are as they were computed, however KV is stored: what coding a
    chunk's own KV loses is no movement, and the neighbours stand there as they are stored. A token that says the same behind any text hardly moves; one that
    takes its meaning from earlier text, as what follows a pronoun does, moves even behind the wrong text. A chunk
    before which no neighbour stands, since there is none or none fits the model's context, gets no note.
    """

    neighbours: Behind = field(default_factory=Similar)
    together: ClassVar[bool] = False

    def making(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> Making:
        """Behind the system prefix, named after the neighbours."""
        behind, isolated = self.neighbours.makings(adapter, prefix, chunk_tokens)
        return Making(f"moved-{behind.kind}", isolated.context, rope_regime=isolated.rope_regime)

    def make(self, shop: Workshop, chunks: Sequence[Ids]) -> Iterator[Kept]:
        """One pass over each chunk behind its neighbours' isolated KV; what comes out is measured and not kept."""
        for chunk in chunks:
            standing = self.neighbours.standing(shop, chunk)
            if standing:
                alone, made = _alone(shop, chunk), kv_behind(shop, standing, chunk)
                note = ChunkNote(chunk, {"moved": _distance(made.kv, alone)})
                yield Kept(note, self.making(shop.adapter, shop.prefix, len(chunk)), made.sources)

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """One number for each token."""
        return note_bytes(chunk_tokens)

    def of_stale(self, scene: Assembled) -> Tensor:
        """(n,) float32: how far each stale token moves, from the notes of its chunk.

        A chunk without a note counts as if all its tokens moved as far as those of the other chunks do on the mean.
        """
        request = scene.request
        chunks = [request.prompt.ids(found.span) for found in scene.matched if found.origin == "reused"]
        notes = notes_about(self, request, chunks)
        known = [note.tensors["moved"] for note in notes if note is not None]
        mean = torch.cat(known).mean() if known else torch.ones(())
        found = [
            mean.expand(len(ids)) if note is None else note.tensors["moved"]
            for ids, note in zip(chunks, notes, strict=True)
        ]
        return torch.cat(found)


def _alone(shop: Workshop, chunk: Ids) -> ChunkKV:
    """A chunk's isolated KV; computed again, and not stored, where what is stored is coded."""
    return isolated_kv(shop, chunk) if shop.storage == "exact" else Isolated().make(shop, chunk).kv


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

    def making(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> Making:
        """Behind the system prefix, as isolated KV."""
        (isolated,) = Isolated().makings(adapter, prefix, chunk_tokens)
        return Making("importance", isolated.context, rope_regime=isolated.rope_regime)

    def make(self, shop: Workshop, chunks: Sequence[Ids]) -> Iterator[Kept]:
        """One pass over each chunk, two over those whose isolated KV is not stored."""
        for chunk in chunks:
            note = ChunkNote(chunk, {"importance": _importance(shop, chunk)})
            yield Kept(note, self.making(shop.adapter, shop.prefix, len(chunk)), (digest_tokens(chunk),))

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """One number for each token."""
        return note_bytes(chunk_tokens)


def _importance(shop: Workshop, chunk: Ids) -> Tensor:
    """(n,) float32."""
    adapter, start = shop.adapter, len(shop.prefix)
    end = start + len(chunk)
    ids = (*shop.prefix, *chunk, *chunk)[: adapter.geometry.context_tokens]
    if len(ids) <= end:
        return torch.zeros(len(chunk))
    isolated = Isolated()
    (making,) = isolated.makings(adapter, shop.prefix, len(chunk))
    kv = shop.store.get(adapter.fingerprint, chunk, making) or isolated.make(shop, chunk).kv
    before = [PlacedSpan(shop.prefix_kv(), 0, 0)] if start else []
    plan = adapter.rows(torch.arange(end, len(ids)))
    peak = PeakAttention()
    plan.watches.append(peak)
    adapter.compute(adapter.canvas(len(ids), [*before, PlacedSpan(kv, start, start)]), ids, plan)
    return peak.weights[start:end].cpu()


def digest_of(importance: Tensor, share: float) -> Tensor:
    """Which of a chunk's n tokens are its digest, ascending: ⌈share · n⌉ of the highest importance (n,), and its first.

    The first SINKS tokens are those that attention rests on whatever it looks for.
    """
    kept = top_tokens(importance, Budget(share).rows(importance.numel()))
    kept[:SINKS] = True
    return kept.nonzero()[:, 0]
