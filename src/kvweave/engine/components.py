"""The model, the embedding model and the index of a knowledge base: heavy, and made when first needed.

The code that runs them is imported with them. Knows nothing of what they are needed for.
"""

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.config import Config
from kvweave.embedding import TextEncoder
from kvweave.engine.settings import KBIdentity
from kvweave.engine.state import KnowledgeBaseState
from kvweave.errors import KnowledgeBaseMismatch
from kvweave.index.documents import DocumentTable, ListedChunk
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.keys import digest_chunks, digest_tokens
from kvweave.models.prompt import PromptTemplate
from kvweave.recipes.context import Ids

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder
    from kvweave.engine.pipeline import Parts
    from kvweave.index.vector_index import VectorIndex
    from kvweave.models.adapter import Adapter


class Components:
    """What the settings name, or else the knowledge base was made with; every part is compared with that.

    Args:
        config: the settings.
        folder: of the knowledge base; the index lies there.
        identity: what it was made with.
        records: its store gets a tier on the model's device.
    """

    def __init__(
        self, config: Config, folder: Path, identity: KBIdentity, records: KnowledgeBaseState
    ) -> None:
        self._config = config
        self._vectors = folder / "vectors"
        self._identity = identity
        self._records = records

    @cached_property
    def adapter(self) -> "Adapter":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.models.loading import load_model

        wanted = self._config.model
        name = wanted.model or self._identity.get("model_name")
        dtype = wanted.dtype if wanted.dtype != "auto" else self._identity.get("model_dtype") or "auto"
        adapter = load_model(name, dtype=dtype, device=wanted.device, home=self._config.home)
        self._identity.check_model(adapter.fingerprint)
        self._records.store.attach_device(adapter.geometry.device, self._config.store.device_bytes)
        return adapter

    @cached_property
    def encoder(self) -> "TextEncoder":
        """The embedding model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.embedding import TextEncoder

        encoder = TextEncoder(
            self._config.embedding.embedding_model or self._identity.get("embedding_source")
        )
        self._identity.check("embedding", encoder.name)
        return encoder

    @cached_property
    def bank(self) -> "VectorIndex":
        """The index; once documents settled the length of its vectors, opening it takes no embedding model."""
        from kvweave.index.vector_index import VectorIndex

        settled = self._identity.get("dimensions")
        try:
            return VectorIndex(self._vectors, int(settled) if settled else self.encoder.dimensions)
        except KnowledgeBaseMismatch:
            # Where nothing is listed: an empty table that was made for another embedding model.
            if settled or not self._delete_unlisted_index():
                raise
            return VectorIndex(self._vectors, self.encoder.dimensions)

    def for_request(self) -> "Parts":
        """All that a request passes through."""
        from kvweave.engine.pipeline import Parts

        return Parts(self.adapter, self._records.shelf, self.bank, self.encoder, self._records.store)

    def forget(self) -> None:
        """Let go of what was made, so that other models may fill the knowledge base anew; the index too, if it is empty."""
        for part in ("adapter", "encoder", "bank"):
            self.__dict__.pop(part, None)
        self._delete_unlisted_index()

    def _delete_unlisted_index(self) -> bool:
        """Delete the index unless documents are listed, by another process perhaps; whether it is gone.

        Under the write lock, in which documents are listed: whoever wrote vectors meanwhile finds out before it lists them.
        """
        with self._records.database.transaction():
            if self._records.shelf.visible():
                return False
            shutil.rmtree(self._vectors, ignore_errors=True)
            return True


class ListedCorpus:
    """Every listed chunk, by what its KV goes by; of a text that several documents hold, the first one counts.

    What is listed is read once, when it is first asked for.

    A chunk whose document another process has taken off the list meanwhile has no others around it.
    """

    def __init__(
        self, shelf: DocumentTable, bank: VectorIndex, encoder: TextEncoder, template: PromptTemplate
    ) -> None:
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
