"""The chunks of a knowledge base, as preparing one of them asks for others."""

from collections.abc import Sequence
from functools import cached_property

from kvweave.embedding.encoder import TextEncoder
from kvweave.knowledge.bank import ChunkBank
from kvweave.knowledge.shelf import ListedChunk, Shelf
from kvweave.models.template import PromptTemplate
from kvweave.recipes.workshop import Ids
from kvweave.store.keys import digest_chunks, digest_tokens


class ListedCorpus:
    """Every listed chunk, by what its KV goes by; of a text that several documents hold, the first one counts.

    What is listed is read once, when it is first asked for.

    A chunk whose document another process has taken off the list meanwhile has no others around it.
    """

    def __init__(self, shelf: Shelf, bank: ChunkBank, encoder: TextEncoder, template: PromptTemplate) -> None:
        self._shelf, self._bank, self._encoder, self._template = shelf, bank, encoder, template

    @cached_property
    def _visible(self) -> frozenset[str]:
        return self._shelf.visible()

    @cached_property
    def _rows(self) -> list[ListedChunk]:
        return self._shelf.all_chunks()

    @cached_property
    def _places(self) -> dict[str, int]:
        return {row.kv_digest: place for place, row in reversed(list(enumerate(self._rows)))}

    @property
    def size(self) -> int:
        """How many different chunks are listed."""
        return len(self._places)

    @cached_property
    def digest(self) -> str:
        """Of what is listed."""
        return digest_chunks(self._places)

    def similar(self, chunk: Ids, most: int) -> list[Ids]:
        """By the vectors that retrieval uses (FusionRAG §3.1)."""
        place = self._places.get(digest_tokens(chunk))
        texts = self._texts([self._rows[place]]) if place is not None else []
        if not texts:
            return []
        vector = self._encoder.encode(texts)[0]
        found = self._bank.nearest(vector, most + 1, self._visible)  # each text once, its own among them
        ids = dict.fromkeys(tuple(self._template.chunk_ids(near)) for near in found)
        return [other for other in ids if other != chunk][:most]

    def before(self, chunk: Ids, most: int) -> list[Ids]:
        """Its document's chunks before it."""
        place = self._places.get(digest_tokens(chunk))
        if place is None:
            return []
        row = self._rows[place]
        earlier = [other for other in self._rows[max(0, place - most) : place] if other.source == row.source]
        return [tuple(self._template.chunk_ids(text)) for text in self._texts(earlier)]

    def _texts(self, rows: Sequence[ListedChunk]) -> list[str]:
        found = self._bank.texts([row.row_id for row in rows])
        return [found[row.row_id] for row in rows if row.row_id in found]
