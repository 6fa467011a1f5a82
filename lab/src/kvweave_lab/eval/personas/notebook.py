"""One user's notes, cut, indexed and searchable: what every system answers from, made once and never changed.

The index is a knowledge base's (`knowledge/`); a search is made once for each question, since no system's differs.
"""

import hashlib
import tempfile
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kvweave.answer_cache.records import Provenance, Vector
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.engine.cached_answers import provenance
from kvweave.engine.components import ListedCorpus
from kvweave.engine.pipeline import Parts, prompt_for
from kvweave.index.chunking import Chunker
from kvweave.index.documents import DocumentTable
from kvweave.index.vector_index import FoundChunk, VectorIndex
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.flops import PassCost
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.types import Document, Source, TokenizedPrompt
from kvweave_lab.eval.personas.people import User
from kvweave_lab.eval.personas.reading import Reader

CHUNK_TOKENS: Final = 128
"""About 100 words, PerCache's chunk (§A.4)."""
TOP_K: Final = 3
"""Chunks in a prompt, as in PerCache's example (§5.3)."""


class _Counted:
    """Counts operations, and never gives way."""

    def __init__(self) -> None:
        self.flops = 0

    def wanted(self) -> bool:
        return False

    def give_way(self) -> None:
        raise AssertionError("nobody else wants the model")

    def ran(self, flops: int) -> None:
        self.flops += flops


class RememberedEncoder(TextEncoder):
    """An embedding model that reads each text once."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model)
        self._vectors: dict[str, Vector] = {}

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """As TextEncoder does."""
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors.update(zip(new, super().encode(new), strict=True))
        return np.stack([self._vectors[text] for text in texts]) if texts else super().encode(texts)


class RememberedBank(VectorIndex):
    """An index that nothing is added to any more: each question is searched for once."""

    def __init__(self, folder: Path, dimensions: int) -> None:
        super().__init__(folder, dimensions)
        self._found: dict[tuple[str, int], list[FoundChunk]] = {}

    def search(
        self, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
    ) -> list[FoundChunk]:
        """As VectorIndex does."""
        if (question, k) not in self._found:
            self._found[question, k] = super().search(question, vector, k, visible)
        return self._found[question, k]


class Notebook:
    """A user's notes in a folder of their own, which goes with it. A context manager.

    Args:
        user: whose notes.
        reader: of this user alone.
        encoder: for retrieval and matching.
        recipe: by which KV is reused anywhere; its preparation is made when first needed.
        cost: of passes, which preparation is counted at.
        chunk_tokens: most tokens of a chunk.
        top_k: chunks in a prompt.
    """

    def __init__(
        self,
        user: User,
        reader: Reader,
        encoder: TextEncoder,
        recipe: Recipe,
        cost: PassCost,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        top_k: int = TOP_K,
    ) -> None:
        self.user, self.reader, self.adapter, self.encoder = user, reader, reader.adapter, encoder
        self.recipe, self.system = recipe, DEFAULT_SYSTEM
        self._cost = cost
        self._temporary = tempfile.TemporaryDirectory(prefix="kvweave-personas-")
        self.folder = Path(self._temporary.name)
        self._database = Database(self.folder / "notes.sqlite")
        self.shelf = DocumentTable(self._database)
        self.bank = RememberedBank(self.folder / "vectors", encoder.dimensions)
        self._index(chunk_tokens)
        self.top_k = min(top_k, len(self.shelf.all_chunks()))
        self.prompt = cache(self._prompt)

    def _index(self, chunk_tokens: int) -> None:
        chunker, template = Chunker(self.adapter.tokenizer, chunk_tokens), self.adapter.template
        everything = []
        with self._database.transaction():
            for note in self.user.notes:
                document = Document(note.name, note.name, note.text, _digest(note.text))
                chunks = chunker.split(document)
                ids = [template.framed(chunk.token_ids) for chunk in chunks]
                self.shelf.put(
                    document, chunks, [digest_tokens(one) for one in ids], [len(one) for one in ids]
                )
                everything += chunks
        self.bank.add(everything, self.encoder.encode([chunk.text for chunk in everything]))

    def parts(self, store: ChunkStore) -> Parts:
        """What a request passes through, with a system's own store."""
        return Parts(self.adapter, self.shelf, self.bank, self.encoder, store)

    def found(self, question: str) -> list[FoundChunk]:
        """The best chunks for a question."""
        vector = self.encoder.encode([question])[0]
        return self.bank.search(question, vector, self.top_k, self.shelf.visible())

    def provenance(self, question: str, epoch: int) -> tuple[list[Source], Provenance]:
        """What an answer to a question rests on, as a knowledge base writes it down."""
        found = self.found(question)
        sources = [Source(each.source, each.start, each.end, each.text, each.score) for each in found]
        return sources, provenance(found, epoch)

    def _prompt(self, question: str) -> TokenizedPrompt:
        prompt = prompt_for(self.parts(MemoryStore()), question, self.top_k, self.system)
        return self.adapter.template.render(prompt)

    @cached_property
    def prepared(self) -> MemoryStore:
        """KV and records of every chunk, as the recipe makes them when notes are added."""
        store, counted = MemoryStore(), _Counted()
        with self.adapter.low_priority(counted, self._cost):
            self.prepare(store)
        self._prepared_flops = counted.flops
        return store

    @property
    def prepared_flops(self) -> int:
        """Operations that preparing takes."""
        _ = self.prepared
        return self._prepared_flops

    def prepare(self, store: ChunkStore) -> None:
        """Make them in a store."""
        corpus = ListedCorpus(self.shelf, self.bank, self.encoder, self.adapter.template)
        ctx = PrepareContext(self.adapter, store, self.adapter.template.prefix_ids(self.system), corpus)
        texts = self.bank.texts([row.row_id for row in self.shelf.all_chunks()])
        prepare_chunks(ctx, [self.adapter.template.chunk_ids(text) for text in texts.values()], self.recipe)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """The tokens of every chunk as it stands in a prompt."""
        return tuple(row.kv_tokens for row in self.shelf.all_chunks())

    def close(self) -> None:
        """Delete the folder."""
        self._database.close()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
