"""Chunks given as a list: which are alike, and which stand before each other."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvweave.recipes.workshop import Ids

Vectors = npt.NDArray[np.float32]


class ChunkList:
    """A corpus of chunks in reading order; of a text that is there twice, the first counts.

    Args:
        chunks: n texts.
        ids: their token ids as they stand in a prompt, n.
        encode: texts to unit vectors (n, width); only asked for when likeness is.
    """

    def __init__(
        self, chunks: Sequence[str], ids: Sequence[Ids], encode: Callable[[Sequence[str]], Vectors]
    ) -> None:
        self._texts, self._ids, self._encode = chunks, list(ids), encode
        self._place = {chunk: number for number, chunk in reversed(list(enumerate(ids)))}

    @cached_property
    def _vectors(self) -> Vectors:
        return self._encode(self._texts)

    def similar(self, chunk: Ids, most: int) -> list[Ids]:
        """By cosine of embeddings; equals of the chunk itself left out (FusionRAG §3.1)."""
        cosines = self._vectors @ self._vectors[self._place[chunk]]
        ranked = (self._ids[number] for number in np.argsort(-cosines, kind="stable"))
        return [ids for ids in dict.fromkeys(ranked) if ids != chunk][:most]

    def before(self, chunk: Ids, most: int) -> list[Ids]:
        """The last of those before it in the list."""
        place = self._place[chunk]
        return self._ids[max(0, place - most) : place]
