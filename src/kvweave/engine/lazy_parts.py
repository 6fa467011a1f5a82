"""The model, the embedding model and the index of a knowledge base: heavy, and made when first needed.

The code that runs them is imported with them. Knows nothing of what they are needed for.
"""

import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.config import Config
from kvweave.engine.identity import Identity
from kvweave.engine.records import Records
from kvweave.errors import KnowledgeBaseMismatch

if TYPE_CHECKING:
    from kvweave.embedding.encoder import TextEncoder
    from kvweave.engine.pipeline import Parts
    from kvweave.knowledge.bank import ChunkBank
    from kvweave.models.adapter import Adapter


class LazyParts:
    """What the settings name, or else the knowledge base was made with; every part is compared with that.

    Args:
        config: the settings.
        folder: of the knowledge base; the index lies there.
        identity: what it was made with.
        records: its store gets a tier on the model's device.
    """

    def __init__(self, config: Config, folder: Path, identity: Identity, records: Records) -> None:
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
        from kvweave.embedding.encoder import TextEncoder

        encoder = TextEncoder(
            self._config.embedding.embedding_model or self._identity.get("embedding_source")
        )
        self._identity.check("embedding", encoder.name)
        return encoder

    @cached_property
    def bank(self) -> "ChunkBank":
        """The index; once documents settled the length of its vectors, opening it takes no embedding model."""
        from kvweave.knowledge.bank import ChunkBank

        settled = self._identity.get("dimensions")
        try:
            return ChunkBank(self._vectors, int(settled) if settled else self.encoder.dimensions)
        except KnowledgeBaseMismatch:
            # Where nothing is listed: an empty table that was made for another embedding model.
            if settled or not self._delete_unlisted_index():
                raise
            return ChunkBank(self._vectors, self.encoder.dimensions)

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
