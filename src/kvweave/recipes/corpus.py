"""Chunks given as documents: which are alike, and which stand before each other."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvweave.recipes.workshop import Ids
from kvweave.store.keys import digest_chunks, digest_tokens

Vectors = npt.NDArray[np.float32]


class ChunkList:
    """A corpus of documents whose chunks stand in reading order; of a text that is there twice, the first counts.

    Args:
        documents: the texts of each one's chunks.
        ids: from a text to its token ids as they stand in a prompt.
        encode: texts to unit vectors (n, width); only asked for when likeness is.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[str]],
        ids: Callable[[str], Sequence[int]],
        encode: Callable[[Sequence[str]], Vectors],
    ) -> None:
        self._texts = [text for chunks in documents for text in chunks]
        self._first = [
            end - len(chunks) for end, chunks in zip(_ends(documents), documents, strict=True) for _ in chunks
        ]
        self._read, self._encode = ids, encode

    @cached_property
    def _ids(self) -> list[Ids]:
        return [tuple(self._read(text)) for text in self._texts]

    @cached_property
    def _place(self) -> dict[Ids, int]:
        return {chunk: number for number, chunk in reversed(list(enumerate(self._ids)))}

    @cached_property
    def _vectors(self) -> Vectors:
        return self._encode(self._texts)

    @property
    def size(self) -> int:
        """How many different chunks there are."""
        return len(self._place)

    @cached_property
    def digest(self) -> str:
        """Of the chunks, in whatever order they stand."""
        return digest_chunks(map(digest_tokens, self._place))

    def similar(self, chunk: Ids, most: int) -> list[Ids]:
        """By cosine of embeddings; equals of the chunk itself left out (FusionRAG §3.1)."""
        cosines = self._vectors @ self._vectors[self._place[chunk]]
        ranked = (self._ids[number] for number in np.argsort(-cosines, kind="stable"))
        return [ids for ids in dict.fromkeys(ranked) if ids != chunk][:most]

    def before(self, chunk: Ids, most: int) -> list[Ids]:
        """The last of those before it in its document."""
        place = self._place[chunk]
        return self._ids[max(self._first[place], place - most) : place]


def _ends(documents: Sequence[Sequence[str]]) -> list[int]:
    """Where each document's chunks end among all of them."""
    return list(accumulate(len(chunks) for chunks in documents))
