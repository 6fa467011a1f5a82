"""The heavy components of a knowledge base: model, embedding model, index. Each is loaded when first needed.

The code that runs them is imported with them.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.config import Config
from kvweave.errors import KnowledgeBaseMismatch, StoreError
from kvweave.index.documents import DocumentTable, ListedChunk
from kvweave.kvstore.keys import digest_chunks, digest_tokens
from kvweave.once import once
from kvweave.state.knowledge_base_state import KnowledgeBaseState
from kvweave.state.metadata import KBMetadata
from kvweave.state.resident import judge_of, load_model, load_reranker

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder
    from kvweave.index.search import Rerank
    from kvweave.index.vector_index import VectorIndex
    from kvweave.kvstore.kv_store import KVStore
    from kvweave.models.adapter import Adapter
    from kvweave.models.prompt import PromptTemplate
    from kvweave.remote.model import AnyModel, RemoteModel
    from kvweave.state.judge import Judge
    from kvweave.state.resident import ResidentModels

Ids = tuple[int, ...]


@dataclass(eq=False)
class Components:
    """Models and index that `config` names, or else those of `metadata`, with which each is compared.

    The index is in `folder`. The store of `state` gets a tier on the model's device. `resident` gives models that are loaded
    already; None loads those of this knowledge base.
    """

    config: Config
    folder: Path
    metadata: KBMetadata
    state: KnowledgeBaseState
    resident: "ResidentModels | None" = None

    @once
    def model(self) -> "AnyModel":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        if self.resident is not None:
            model = self.resident.model
        else:
            model = load_model(self.metadata.model_settings, self.config.home)
        self.metadata.check_model(model.fingerprint)
        self.state.store.attach_device(model.geometry.device, self.config.store.device_bytes)
        return model

    @property
    def loads_recorded_model(self) -> bool:
        """Whether the model that answers is the one that the knowledge base was made with; loads none to know it."""
        if self.resident is None:
            return self.metadata.names_recorded_model
        return self.metadata.get("model_digest") in (None, self.resident.model.fingerprint.digest)

    @property
    def adapter(self) -> "Adapter":
        """The model; raises as `model`, and UnsupportedModel if stored KV cannot be placed in it."""
        from kvweave.models.snapshot_adapter import fused

        return fused(self.model)

    @once
    def judge(self) -> "Judge | None":
        """Judges with the model whether questions ask the same; None if stored KV cannot be placed in it here. Raises as `model`."""
        if self.resident is not None:
            return self.resident.judge
        return judge_of(self.model, self.config.home)

    @once
    def encoder(self) -> "TextEncoder":
        """The embedding model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.embedding import TextEncoder

        if self.resident is not None:
            encoder = self.resident.encoder
        else:
            encoder = TextEncoder(
                self.config.embedding.embedding_model or self.metadata.get("embedding_source")
            )
        self.metadata.check("embedding", encoder.name)
        return encoder

    @once
    def index(self) -> "VectorIndex":
        """The index. Opening it loads the embedding model only while the vectors' length is not recorded."""
        from kvweave.index.vector_index import VectorIndex

        recorded = self.metadata.get("dimensions")
        try:
            return VectorIndex(
                self.folder / "vectors", int(recorded) if recorded else self.encoder.dimensions, self._rerank
            )
        except (KnowledgeBaseMismatch, StoreError):
            # With no document listed, it is an empty table that was made for another embedding model, or torn by a power cut.
            if not self._delete_unlisted_index():
                raise
            return VectorIndex(self.folder / "vectors", self.encoder.dimensions, self._rerank)

    @once
    def _rerank(self) -> "Rerank | None":
        if self.resident is not None:
            return self.resident.rerank
        return load_reranker(self.config.retrieval.reranker)

    def request_context(self) -> "RequestContext":
        """Load everything that a request passes through."""

        self.metadata.check_model(self.model.check_weights())  # another process may have filled it anew
        self.metadata.check("embedding", self.encoder.name)
        return RequestContext(self.model, self.state.documents, self.index, self.encoder, self.state.store)

    def forget(self) -> None:
        """Drop what was loaded, and an empty index, so that other models may fill the knowledge base."""
        for part in ("model", "judge", "encoder", "index"):
            self.__dict__.pop(part, None)
        self._delete_unlisted_index()

    def _delete_unlisted_index(self) -> bool:
        """Delete the index unless documents are listed, perhaps by another process; return whether it is gone.

        The write lock is held, under which documents are listed: a process that has just written vectors notices
        before it lists them.
        """
        with self.state.database.transaction():
            if self.state.documents.visible_versions():
                return False
            shutil.rmtree(self.folder / "vectors", ignore_errors=True)
            return True


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts that a request passes through."""

    model: "AnyModel"
    documents: DocumentTable
    index: "VectorIndex"
    encoder: "TextEncoder"
    store: "KVStore"

    @property
    def preparing_model(self) -> "Adapter | RemoteModel":
        """The model; raises UnsupportedModel if no chunks can be prepared for it."""
        from kvweave.remote.model import preparing_model

        return preparing_model(self.model)

    @property
    def adapter(self) -> "Adapter":
        """The model; raises UnsupportedModel if stored KV cannot be placed in it here."""
        from kvweave.models.snapshot_adapter import fused

        return fused(self.model)


@dataclass(eq=False)
class ListedCorpus:
    """The chunks of all listed documents, as preparations need them; equal chunks count once, as the first of them.

    The list is read once, when first needed. A chunk whose document another process has removed since has no
    neighbours.
    """

    documents: DocumentTable
    index: "VectorIndex"
    encoder: "TextEncoder"
    template: "PromptTemplate"

    @cached_property
    def _visible(self) -> frozenset[str]:
        return self.documents.visible_versions()

    @cached_property
    def _rows(self) -> list[ListedChunk]:
        return self.documents.all_chunks()

    @cached_property
    def _places(self) -> dict[str, int]:
        return {row.kv_digest: place for place, row in reversed(list(enumerate(self._rows)))}

    @property
    def size(self) -> int:
        """The number of different chunks."""
        return len(self._places)

    @cached_property
    def digest(self) -> str:
        """Names the set of chunks; changes when any comes or goes."""
        return digest_chunks(self._places)

    def similar(self, chunk: Ids, limit: int) -> list[Ids]:
        """Return the most similar chunks by the vectors that retrieval uses (FusionRAG §3.1)."""
        place = self._places.get(digest_tokens(chunk))
        texts = self._texts([self._rows[place]]) if place is not None else []
        if not texts:
            return []
        vector = self.encoder.encode(texts)[0]
        found = self.index.nearest(vector, limit + 1, self._visible)  # each text once, its own among them
        ids = dict.fromkeys(tuple(self.template.chunk_ids(near)) for near in found)
        return [other for other in ids if other != chunk][:limit]

    def previous(self, chunk: Ids, limit: int) -> list[Ids]:
        """Return the chunks before it in its document, in order."""
        place = self._places.get(digest_tokens(chunk))
        if place is None:
            return []
        row = self._rows[place]
        before = [other for other in self._rows[max(0, place - limit) : place] if other.source == row.source]
        return [tuple(self.template.chunk_ids(text)) for text in self._texts(before)]

    def _texts(self, rows: Sequence[ListedChunk]) -> list[str]:
        found = self.index.texts([row.row_id for row in rows])
        return [found[row.row_id] for row in rows if row.row_id in found]
