"""One user's notes, split, indexed and searchable: what every system answers from. It is built once and never changes.

Chunking, index and prompts are those of a knowledge base. Each question is searched for once, since retrieval is the same
in all systems.
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

from kvweave.answer_cache.records import AnswerProvenance, Vector
from kvweave.answering.cached_answers import provenance
from kvweave.answering.kb_question import prompt_for
from kvweave.database import Database
from kvweave.documents.chunking import Chunker
from kvweave.embedding import TextEncoder
from kvweave.index.documents import DocumentTable
from kvweave.index.search import FoundChunk
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.preemption import PassCost
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.results import Source
from kvweave.state.components import ListedCorpus, RequestContext
from kvweave.types import Document, TokenizedPrompt
from kvweave_lab.eval.personas.model import MemoizedModel
from kvweave_lab.eval.personas.users import User

CHUNK_TOKENS: Final = 128
"""About 100 words, PerCache's chunk (§A.4)."""
TOP_K: Final = 3
"""Retrieved chunks per prompt, as in PerCache's example (§5.3)."""


class _FlopsCounter:
    """A request guard that counts operations and never waits."""

    def __init__(self) -> None:
        self.flops = 0

    def stop_requested(self) -> bool:
        return False

    def wait_for_requests(self) -> None:
        raise AssertionError("no other request uses the model")

    def record_flops(self, flops: int) -> None:
        self.flops += flops


class MemoizedEncoder(TextEncoder):
    """An embedding model that embeds each distinct text once."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__(model)
        self._vectors: dict[str, Vector] = {}

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vectors of texts."""
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors.update(zip(new, super().encode(new), strict=True))
        return np.stack([self._vectors[text] for text in texts]) if texts else super().encode(texts)


class MemoizedIndex(VectorIndex):
    """An index that searches for each distinct question once. Add everything before the first search."""

    def __init__(self, folder: Path, dimensions: int) -> None:
        super().__init__(folder, dimensions)
        self._found: dict[tuple[str, int], list[FoundChunk]] = {}

    def search(
        self, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
    ) -> list[FoundChunk]:
        """Return the best chunks."""
        if (question, k) not in self._found:
            self._found[question, k] = super().search(question, vector, k, visible)
        return self._found[question, k]


class UserCorpus:
    """A user's notes, indexed in a temporary folder. A context manager, which deletes the folder.

    Args:
        user: the owner of the notes.
        model: for this user alone.
        encoder: for retrieval and question matching.
        recipe: reuses KV at any position; chunks are prepared for it at first use.
        cost: of passes, for counting the operations of preparation.
        chunk_tokens: largest chunk.
        top_k: retrieved chunks per prompt.
    """

    def __init__(
        self,
        user: User,
        model: MemoizedModel,
        encoder: TextEncoder,
        recipe: Recipe,
        cost: PassCost,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        top_k: int = TOP_K,
    ) -> None:
        self.user, self.model, self.adapter, self.encoder = user, model, model.adapter, encoder
        self.recipe, self.system = recipe, DEFAULT_SYSTEM
        self._cost = cost
        self._temporary = tempfile.TemporaryDirectory(prefix="kvweave-personas-")
        self.folder = Path(self._temporary.name)
        self._database = Database(self.folder / "notes.sqlite")
        self.documents = DocumentTable(self._database)
        self.index = MemoizedIndex(self.folder / "vectors", encoder.dimensions)
        self._index(chunk_tokens)
        self.top_k = min(top_k, len(self.documents.all_chunks()))
        self.prompt = cache(self._prompt)

    def _index(self, chunk_tokens: int) -> None:
        chunker, template = Chunker(self.adapter.tokenizer, chunk_tokens), self.adapter.template
        all_chunks = []
        with self._database.transaction():
            for note in self.user.notes:
                document = Document(note.name, note.name, note.text, _digest(note.text))
                chunks = chunker.split(document)
                ids = [template.with_separator(chunk.token_ids) for chunk in chunks]
                self.documents.put(
                    document, chunks, [digest_tokens(one) for one in ids], [len(one) for one in ids]
                )
                all_chunks += chunks
        self.index.add(all_chunks, self.encoder.encode([chunk.text for chunk in all_chunks]))

    def context(self, store: KVStore) -> RequestContext:
        """Return the components of a request, with a system's own store."""
        return RequestContext(self.adapter, self.documents, self.index, self.encoder, store)

    def search(self, question: str) -> list[FoundChunk]:
        """Return the best chunks for a question."""
        vector = self.encoder.encode([question])[0]
        return self.index.search(question, vector, self.top_k, self.documents.visible_versions())

    def provenance(self, question: str, epoch: int) -> tuple[list[Source], AnswerProvenance]:
        """Return the sources and the provenance of an answer to a question, as a knowledge base records them."""
        found = self.search(question)
        sources = [Source(each.source, each.start, each.end, each.text, each.score) for each in found]
        return sources, provenance(found, epoch)

    def _prompt(self, question: str) -> TokenizedPrompt:
        prompt = prompt_for(self.context(MemoryStore()), question, self.top_k, self.system)
        return self.adapter.template.render(prompt)

    @cached_property
    def prepared(self) -> MemoryStore:
        """KV and features of every chunk, as the recipe prepares them when notes are added."""
        store, counter = MemoryStore(), _FlopsCounter()
        with self.adapter.low_priority(counter, self._cost):
            self.prepare(store)
        self._prepared_flops = counter.flops
        return store

    @property
    def prepared_flops(self) -> int:
        """Operations of preparing all chunks."""
        _ = self.prepared
        return self._prepared_flops

    def prepare(self, store: KVStore) -> None:
        """Prepare every chunk in a store."""
        corpus = ListedCorpus(self.documents, self.index, self.encoder, self.adapter.template)
        ctx = PrepareContext(self.adapter, store, self.adapter.template.prefix_ids(self.system), corpus)
        texts = self.index.texts([row.row_id for row in self.documents.all_chunks()])
        prepare_chunks(ctx, [self.adapter.template.chunk_ids(text) for text in texts.values()], self.recipe)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """The tokens of every chunk as it is rendered in a prompt."""
        return tuple(row.kv_tokens for row in self.documents.all_chunks())

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
