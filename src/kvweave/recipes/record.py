"""What is recorded of every chunk beside its KV, before any question: stored as a note."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvweave.core import Making
from kvweave.models.adapter import Adapter
from kvweave.recipes.kept import Kept
from kvweave.recipes.workshop import Ids, Workshop


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

        Stores none of it. A chunk about which nothing can be said yet gets no note, and is asked about again.
        """
        ...
