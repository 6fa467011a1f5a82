"""What is recorded of every chunk beside its KV, before any question: stored as a note."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Corpus, Ids, Workshop
from kvweave.recipes.entries import Kept
from kvweave.recipes.state import PrefillRequest
from kvweave.types import ChunkNote, Making


class Record(Protocol):
    """Makes a note about each of several chunks at once, since what is recorded may lie between them."""

    @property
    def together(self) -> bool:
        """Whether it does, so that a note about a chunk depends on which others it is made with."""
        ...

    def making(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> Making:
        """What names the note about a chunk of this length behind a system prefix."""
        ...

    def make(self, shop: Workshop, chunks: Sequence[Ids]) -> Iterator[Kept]:
        """Look at different chunks; yields their notes, and whatever else the looking left that is worth keeping.

        Stores none of it. A chunk about which nothing can be said among the chunks that there are gets no note, and is
        asked about again among others.
        """
        ...

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """About how much of the store what is yielded about a chunk of this length takes."""
        ...


def notes_about(record: Record, request: PrefillRequest, chunks: Sequence[Ids]) -> list[ChunkNote | None]:
    """What was recorded of each chunk behind the request's system prefix, in one look-up; None where nothing was."""
    wanted = [(ids, record.making(request.adapter, request.prefix, len(ids))) for ids in chunks]
    return request.store.find_notes(request.adapter.fingerprint, wanted)


def unsaid(making: Making, corpus: Corpus) -> Making:
    """What names the empty note on a chunk about which a record of this making says nothing among a corpus' chunks."""
    return replace(making, kind=f"{making.kind}-unsaid", context=(*making.context, corpus.digest))
