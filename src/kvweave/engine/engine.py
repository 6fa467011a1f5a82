"""A knowledge base, as users hold it: open, add, ask, stream, close."""

import re
import shutil
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvweave.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_NEW_TOKENS,
    Config,
    read_config,
    within_context,
)
from kvweave.core import AddReport, Answer
from kvweave.engine.identity import Identity
from kvweave.engine.records import SWEEP_GRACE_S, Pending, Progress, Records
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest, PathNotFound
from kvweave.knowledge.shelf import ListedDocument, Shelf
from kvweave.models.template import DEFAULT_SYSTEM
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.database import Database

if TYPE_CHECKING:
    from kvweave.embedding.encoder import TextEncoder
    from kvweave.knowledge.bank import ChunkBank
    from kvweave.models.adapter import Adapter

_KB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KnowledgeBase:
    """Documents, their chunks and vectors, and the chunk KV of one model, under one folder.

    The unit of isolation: nothing stored is shared with another knowledge base. Two processes may use one
    at once. The model and the embedding model are loaded when first needed, and so is the code that runs
    them: listing and removing documents takes neither. A context manager.
    """

    def __init__(self, name: str, config: Config) -> None:
        if not _KB_NAME.fullmatch(name):
            raise InvalidRequest(
                f"knowledge base name {name!r} is not usable: letters, digits, '.', '_' and '-', 100 at most, no "
                "other character first"
            )
        self.name = name
        self.config = config
        self.folder = config.home / "kb" / name
        self._database = Database(self.folder / "catalog.sqlite")
        self._identity = Identity(self._database, name)
        self._shelf = Shelf(self._database)
        self.store = ChunkStore(
            self.folder / "kv", namespace=name, limit_bytes=config.store.limit_bytes, database=self._database
        )
        self._records = Records(self._database, self._shelf, self.store, Pending(self._database))

    # Parts that are heavy, and made when first needed

    @cached_property
    def adapter(self) -> "Adapter":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.models.loading import load_model

        wanted = self.config.model
        name = wanted.model or self._identity.get("model")
        adapter = load_model(name, dtype=wanted.dtype, device=wanted.device)
        self._identity.check_model(adapter.fingerprint)
        return adapter

    @cached_property
    def _encoder(self) -> "TextEncoder":
        from kvweave.embedding.encoder import TextEncoder

        encoder = TextEncoder(self.config.embedding.embedding_model or self._identity.get("embedding_source"))
        self._identity.check("embedding", encoder.name, "--embedding-model")
        if self.config.embedding.embedding_model:
            self._identity.settle(embedding_source=self.config.embedding.embedding_model)
        return encoder

    @cached_property
    def _bank(self) -> "ChunkBank":
        from kvweave.knowledge.bank import ChunkBank

        settled = self._identity.get("dimensions")
        dimensions = int(settled) if settled else self._encoder.dimensions
        self._identity.settle(dimensions=str(dimensions))
        return ChunkBank(self.folder / "vectors", dimensions)

    @property
    def _system(self) -> str:
        """The instruction that every prompt starts with: settled once, since chunk KV is computed behind it."""
        given = self.config.system
        if given is not None:
            self._identity.check("system", given, "--system")
        self._identity.settle(system=DEFAULT_SYSTEM)
        return self._identity.get("system") or ""

    # Documents

    def add(self, *paths: str | Path, progress: Progress = lambda stage, done, total: None) -> AddReport:
        """Index files and folders: read, cut, embed, compute chunk KV. Again: only what changed.

        A file that vanished from a folder named again is removed. Safe to interrupt: what was finished is
        kept, and the next `add` goes on. Raises PathNotFound, InvalidRequest, KnowledgeBaseMismatch.
        """
        from kvweave.engine.indexing import Indexer
        from kvweave.knowledge.chunking import Chunker
        from kvweave.recipes.methods import recipe_named

        if not paths:
            raise InvalidRequest("no paths to add")
        recipe = recipe_named(self.config.recipe)
        given = [Path(path).expanduser().absolute() for path in paths]
        for path in given:
            if not path.exists():
                raise PathNotFound(f"{path} does not exist")
        adapter, cutting = self.adapter, self.config.chunking
        chunk_tokens = within_context(
            cutting.chunk_tokens, DEFAULT_CHUNK_TOKENS, adapter.geometry.context_tokens
        )
        indexer = Indexer(
            self._records,
            self._bank,
            self._encoder,
            adapter,
            Chunker(adapter.tokenizer, chunk_tokens, cutting.overlap_tokens),
            recipe,
            self._system,
        )
        return indexer.add(given, progress)

    def documents(self) -> list[ListedDocument]:
        """What is indexed, by source."""
        return self._shelf.list()

    def pending(self) -> list[str]:
        """Documents whose chunk KV has not been computed to the end: an `add` was interrupted."""
        return self._records.pending.sources()

    def remove(self, *paths: str | Path) -> list[str]:
        """Take out documents, or all under a folder; returns their sources.

        At the commit none of their chunks, vectors or KV can be found any more. Raises PathNotFound for a
        path from which nothing is indexed, before anything is removed.
        """
        sources: dict[str, None] = {}
        for path in (Path(p).expanduser().absolute() for p in paths):
            found = [str(path)] if self._shelf.get(str(path)) else self._shelf.sources_under(path)
            if not found:
                raise PathNotFound(
                    f"nothing in knowledge base {self.name!r} comes from {path}; `kvweave ls` lists it"
                )
            sources.update(dict.fromkeys(found))
        return self._remove(sources)

    def remove_all(self) -> list[str]:
        """Empty the knowledge base; it may then be filled anew with another model."""
        removed = self._remove([document.source for document in self.documents()])
        self.store.clear()
        self._identity.clear()
        for part in ("adapter", "_encoder", "_bank"):
            self.__dict__.pop(part, None)
        shutil.rmtree(self.folder / "vectors", ignore_errors=True)
        return removed

    def _remove(self, sources: Iterable[str]) -> list[str]:
        removed = list(sources)
        for source in removed:
            self._records.remove(source)
        if removed and self._identity.get("dimensions"):
            self._bank.sweep(self._shelf.visible(), SWEEP_GRACE_S)
        return removed

    # Questions

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer a question from the documents.

        Options: `recipe`, `ratio`, `top_k`, `drop_chunks`. Raises EmptyKnowledgeBase, InvalidRequest,
        PromptTooLong, KnowledgeBaseMismatch.
        """
        stream = self.stream(question, **options)
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        recipe: str | None = None,
        ratio: float | None = None,
        top_k: int | None = None,
        drop_chunks: bool = False,
    ) -> "AnswerStream":
        """Answer piece by piece: iterate for the text; `.answer` holds the whole once the iteration ends."""
        from kvweave.engine.pipeline import Parts, Question, answer
        from kvweave.recipes.methods import recipe_named

        if not question.strip():
            raise InvalidRequest("the question is empty")
        if top_k is not None and top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least one chunk is needed")
        if not self._shelf.visible():
            raise EmptyKnowledgeBase(
                f"knowledge base {self.name!r} holds no documents; add some with `kvweave add PATH`"
            )
        chosen = recipe_named(recipe or self.config.recipe)
        adapter = self.adapter
        asked = Question(
            text=question,
            recipe=chosen,
            ratio=ratio,
            top_k=self.config.retrieval.top_k if top_k is None else top_k,
            system=self._system,
            generation=self.config.generation,
            max_new_tokens=within_context(
                self.config.generation.max_new_tokens, DEFAULT_NEW_TOKENS, adapter.geometry.context_tokens
            ),
            drop_chunks=drop_chunks,
        )
        return AnswerStream(answer(Parts(adapter, self._shelf, self._bank, self._encoder, self.store), asked))

    def close(self) -> None:
        """Write counters and close files; the object is unusable afterwards."""
        self.store.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AnswerStream:
    """The pieces of an answer, as an iterator; `answer` is there once it is exhausted."""

    def __init__(self, pieces: Generator[str, None, Answer]) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        self._answer = yield from self._pieces

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        if self._answer is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answer


def open_knowledge_base(
    name: str = "default", *, home: str | Path | None = None, **settings: Any
) -> KnowledgeBase:
    """Open a knowledge base, making it if it is not there.

    `settings` are those of `kvweave.config` (`model`, `dtype`, `device`, `embedding_model`, `chunk_tokens`,
    `overlap_tokens`, `top_k`, `limit_bytes`, `recipe`, `system`, …). Without `model`, the one it was made
    with is used, for a new one the shipped reference model. Raises InvalidRequest for an unknown setting.
    """
    return KnowledgeBase(name, read_config(Path(home) if home else None, **settings))
