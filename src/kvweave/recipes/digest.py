"""Digests of chunks: which of its tokens a model looks at when it repeats a chunk word by word (KVzip).

Made once for each chunk, at indexing time, and stored as a note: an importance for every token, of which whoever
reads it takes as many as it likes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.core import ChunkNote, Making
from kvweave.models.adapter import Adapter
from kvweave.models.attention_shares import PeakAttention
from kvweave.models.canvas import PlacedSpan
from kvweave.ops.scores import top_tokens
from kvweave.recipes.kept import Kept
from kvweave.recipes.prepare import Isolated
from kvweave.recipes.request import Budget
from kvweave.recipes.room import note_bytes
from kvweave.recipes.workshop import Ids, Workshop
from kvweave.store.keys import digest_tokens

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
