"""A knowledge base, as users hold it: open, add, ask, stream, close."""

import re
import shutil
import time
from collections.abc import Generator, Iterator
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
from kvweave.core import AddReport, Answer, ExplainedToken, Prompt
from kvweave.engine.identity import Identity
from kvweave.engine.records import SWEEP_GRACE_S, Progress, Records
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch, PathNotFound
from kvweave.knowledge.shelf import ListedDocument, Shelf
from kvweave.models.template import DEFAULT_SYSTEM
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.database import Database

if TYPE_CHECKING:
    from kvweave.embedding.encoder import TextEncoder
    from kvweave.engine.indexing import Indexer
    from kvweave.engine.pipeline import Answered
    from kvweave.knowledge.bank import ChunkBank
    from kvweave.models.adapter import Adapter
    from kvweave.recipes.recipe import Recipe

_KB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KnowledgeBase:
    """Documents, their chunks and vectors, and the chunk KV of one model, under one folder.

    The unit of isolation: nothing stored is shared with another knowledge base. Two processes may use one
    at once. The model and the embedding model are loaded when first needed, and so is the code that runs
    them: listing and removing documents takes neither. A context manager.
    """

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.config = config
        self.folder = _folder(name, config)
        self._database = Database(self.folder / "catalog.sqlite")
        self._identity = Identity(self._database, name)
        self._shelf = Shelf(self._database)
        self.store = ChunkStore(
            self.folder / "kv",
            namespace=name,
            limit_bytes=config.store.limit_bytes,
            database=self._database,
            owned_only=True,  # KV of a document that is removed meanwhile must not be kept
        )
        self._records = Records(self._database, self._shelf, self.store)

    # Parts that are heavy, and made when first needed

    @cached_property
    def adapter(self) -> "Adapter":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.models.loading import load_model

        wanted = self.config.model
        name = wanted.model or self._identity.get("model_name")
        dtype = wanted.dtype if wanted.dtype != "auto" else self._identity.get("model_dtype") or "auto"
        adapter = load_model(name, dtype=dtype, device=wanted.device, home=self.config.home)
        self._identity.check_model(adapter.fingerprint)
        return adapter

    @cached_property
    def encoder(self) -> "TextEncoder":
        """The embedding model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        from kvweave.embedding.encoder import TextEncoder

        encoder = TextEncoder(self.config.embedding.embedding_model or self._identity.get("embedding_source"))
        self._identity.check("embedding", encoder.name)
        return encoder

    @cached_property
    def _bank(self) -> "ChunkBank":
        from kvweave.knowledge.bank import ChunkBank

        folder, settled = self.folder / "vectors", self._identity.get("dimensions")
        try:
            return ChunkBank(folder, int(settled) if settled else self.encoder.dimensions)
        except KnowledgeBaseMismatch:
            if settled:
                raise
            # Nothing was ever committed: an empty table that was made for another embedding model.
            shutil.rmtree(folder)
            return ChunkBank(folder, self.encoder.dimensions)

    def _settled(self, fact: str, given: object, default: object) -> str:
        """What holds for this knowledge base: the value given or else settled, which must not contradict."""
        if given is not None:
            self._identity.check(fact, str(given))
            return str(given)
        return self._identity.get(fact) or str(default)

    @property
    def _system(self) -> str:
        """The instruction that every prompt starts with: settled by the first `add`, since KV is computed behind it."""
        return self._settled("system", self.config.system, DEFAULT_SYSTEM)

    def _recipe(self, recipe: str | None = None, prepare: str | None = None) -> "Recipe":
        """What is named here, else in the settings; there a preparation is for those recipes that prepare something."""
        from kvweave.recipes.methods import recipe_named
        from kvweave.recipes.prepare import NotPrepared

        auxiliary = self.config.model.auxiliary
        if recipe is None:
            return recipe_named(self.config.recipe, prepare or self.config.prepare, auxiliary)
        chosen = recipe_named(recipe, prepare, auxiliary)
        complete = prepare is not None or "+" in recipe or chosen.prepare == NotPrepared()
        return chosen if complete else recipe_named(recipe, self.config.prepare, auxiliary)

    def _indexer(self) -> "Indexer":
        """What adds documents, made of parts that agree with what is settled. Settles nothing itself."""
        from kvweave.engine.indexing import Indexer
        from kvweave.knowledge.chunking import Chunker

        recipe, adapter, cutting = self._recipe(), self.adapter, self.config.chunking
        longest = within_context(None, DEFAULT_CHUNK_TOKENS, adapter.geometry.context_tokens)
        chunk_tokens = self._settled("chunk_tokens", cutting.chunk_tokens, longest)
        overlap_tokens = self._settled("overlap_tokens", cutting.overlap_tokens, 0)
        around = len(adapter.template.prefix_ids(self._system)) + len(adapter.template.framed(()))
        room = adapter.geometry.context_tokens - around - 1  # a question has one token at least
        if int(chunk_tokens) > room:
            raise InvalidRequest(
                f"chunk_tokens is {chunk_tokens}, but behind the instruction {adapter.fingerprint.name} has room for "
                f"{room}; use less, since several chunks and a question must fit together"
            )
        chunker = Chunker(adapter.tokenizer, int(chunk_tokens), int(overlap_tokens))
        return Indexer(
            self._records,
            self._bank,
            self.encoder,
            adapter,
            chunker,
            recipe,
            self._system,
            self.config.home / "kb",
        )

    def _settle(self, indexer: "Indexer") -> None:
        """Write down what this knowledge base is made with, now that documents come in."""
        facts = {
            "embedding": self.encoder.name,
            "dimensions": str(self.encoder.dimensions),
            "system": indexer.system,
            "chunk_tokens": str(indexer.chunker.chunk_tokens),
            "overlap_tokens": str(indexer.chunker.overlap_tokens),
        }
        given = self.config.embedding.embedding_model
        if given is not None:
            folder = Path(given).expanduser()
            facts["embedding_source"] = str(folder.absolute()) if folder.exists() else given
        self._identity.settle(self.adapter.fingerprint, facts)

    # Documents

    def add(self, *paths: str | Path, progress: Progress = lambda stage, done, total: None) -> AddReport:
        """Index files and folders: read, cut, embed, compute chunk KV. Again: only what changed.

        A file that vanished from a folder named again is removed. Safe to interrupt: what was finished is
        kept, and the next `add` goes on. Raises PathNotFound, InvalidRequest, KnowledgeBaseMismatch.
        """
        if not paths:
            raise InvalidRequest("no paths to add")
        given = [_place(path) for path in paths]
        for path in given:
            if not path.exists():
                raise PathNotFound(f"{path} does not exist")
        indexer = self._indexer()
        return indexer.add(given, progress, settle=lambda: self._settle(indexer))

    def documents(self) -> list[ListedDocument]:
        """What is indexed, by source."""
        return self._shelf.list()

    def missing_kv(self) -> int:
        """How many chunks have no KV stored: not computed yet, beyond the limit, evicted or dropped."""
        return len(self._indexer().missing_kv()) if self._shelf.visible() else 0

    def lost_documents(self) -> list[str]:
        """Listed documents whose chunks the index no longer holds: a folder was deleted, a disk failed."""
        if not self._shelf.visible():
            return []
        rows = self._bank.rows_by_version()
        return [d.source for d in self.documents() if rows.get(d.version, 0) < d.chunks]

    def remove(self, *paths: str | Path) -> list[str]:
        """Take out documents, or all under a folder; returns their sources.

        At the commit none of their chunks, vectors or KV can be found any more. Raises PathNotFound for a
        path from which nothing is indexed, before anything is removed.
        """
        sources: dict[str, None] = {}
        for path in map(_place, paths):
            found = [str(path)] if self._shelf.get(str(path)) else self._shelf.sources_under(path)
            if not found:
                raise PathNotFound(
                    f"nothing in knowledge base {self.name!r} comes from {path}; `kvweave ls` lists it"
                )
            sources.update(dict.fromkeys(found))
        began_s = time.time()
        versions = [version for version in map(self._records.remove, sources) if version]
        if versions and self._identity.get("dimensions"):
            self._bank.delete(versions, before_s=began_s)
            self._bank.sweep(self._shelf.visible(), SWEEP_GRACE_S)
        return list(sources)

    def remove_all(self) -> list[str]:
        """Empty the knowledge base; it may then be filled anew with another model."""
        removed = [document.source for document in self.documents()]
        with self._database.transaction():
            for source in removed:
                self._records.remove(source)
            self._identity.clear()
        self.store.clear()
        for part in ("adapter", "encoder", "_bank"):
            self.__dict__.pop(part, None)
        shutil.rmtree(self.folder / "vectors", ignore_errors=True)
        return removed

    # Questions

    def ask(
        self,
        question: str,
        *,
        recipe: str | None = None,
        prepare: str | None = None,
        ratio: float | None = None,
        coverage: float | None = None,
        top_k: int | None = None,
        drop_chunks: bool = False,
    ) -> Answer:
        """Answer a question from the documents; see `stream` for the options and errors."""
        stream = self.stream(
            question,
            recipe=recipe,
            prepare=prepare,
            ratio=ratio,
            coverage=coverage,
            top_k=top_k,
            drop_chunks=drop_chunks,
        )
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        recipe: str | None = None,
        prepare: str | None = None,
        ratio: float | None = None,
        coverage: float | None = None,
        top_k: int | None = None,
        drop_chunks: bool = False,
    ) -> "AnswerStream":
        """Answer piece by piece: iterate for the text; `.answer` holds the whole once the iteration ends.

        `recipe` names how stored KV is reused, `prepare` how chunks were prepared, where not as the recipe would.
        `ratio` 0..1 is the share of stale context tokens to recompute; instead, `coverage` 0..1 recomputes as few as
        hold that share of the selector's scores. `top_k` is the number of chunks; `drop_chunks` leaves out the
        lowest-ranked ones if the prompt is too long.
        Raises EmptyKnowledgeBase, InvalidRequest, UnknownRecipe, KnowledgeBaseMismatch; PromptTooLong comes
        with the first piece.
        """
        from kvweave.engine.pipeline import Parts, Question, answer

        question, top_k = self._checked(question, top_k)
        chosen = self._recipe(recipe, prepare)
        chosen.budget(ratio, coverage)  # refused before the model is loaded
        adapter, encoder = self.adapter, self.encoder
        encoder.load()  # its loading is not the first question's time
        asked = Question(
            text=question,
            recipe=chosen,
            ratio=ratio,
            coverage=coverage,
            top_k=top_k,
            system=self._system,
            generation=self.config.generation,
            max_new_tokens=within_context(
                self.config.generation.max_new_tokens, DEFAULT_NEW_TOKENS, adapter.geometry.context_tokens
            ),
            drop_chunks=drop_chunks,
        )
        pieces = answer(Parts(adapter, self._shelf, self._bank, encoder, self.store), asked)
        return AnswerStream(pieces, adapter.tokenizer)

    def prompt(self, question: str, *, top_k: int | None = None) -> Prompt:
        """What the question would be answered from, and nothing computed: its chunks in prompt order.

        Raises EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch.
        """
        from kvweave.engine.pipeline import Parts, prompt_for

        question, top_k = self._checked(question, top_k)
        parts = Parts(self.adapter, self._shelf, self._bank, self.encoder, self.store)
        return prompt_for(parts, question, top_k, self._system)

    def _checked(self, question: str, top_k: int | None) -> tuple[str, int]:
        """A question and a number of chunks that can be answered from what there is."""
        if not question.strip():
            raise InvalidRequest("the question is empty")
        top_k = self.config.retrieval.top_k if top_k is None else top_k
        if top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least one chunk is needed")
        documents = self.documents()
        if not documents:
            raise EmptyKnowledgeBase(
                f"knowledge base {self.name!r} holds no documents; add some with `kvweave add PATH`"
            )
        # A terminal may hand over broken bytes.
        whole = question.encode("utf-8", "replace").decode("utf-8")
        return whole, min(top_k, sum(document.chunks for document in documents))

    def close(self) -> None:
        """Write counters and close files; using the object afterwards raises StoreError. Closing twice is fine."""
        if not self._database.closed:
            self.store.close()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AnswerStream:
    """The pieces of an answer, as an iterator; `answer` and `explain` are there once it is exhausted."""

    def __init__(self, pieces: "Generator[str, None, Answered]", tokenizer: Any) -> None:
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._answered: Answered | None = None

    def __iter__(self) -> Iterator[str]:
        finished: Answered | None = yield from self._pieces
        # A second iteration finds nothing more and takes nothing away.
        self._answered = finished or self._answered

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        return self._finished.answer

    def explain(self) -> tuple[ExplainedToken, ...]:
        """Every token of the prompt with where its KV came from; raises as `answer` does."""
        from kvweave.engine.explanation import explain

        return explain(self._finished, self._tokenizer)

    @property
    def _finished(self) -> "Answered":
        if self._answered is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answered


def open_knowledge_base(
    name: str = "default", *, home: str | Path | None = None, **settings: Any
) -> KnowledgeBase:
    """Open a knowledge base, making it if it is not there.

    `settings` are those of `kvweave.config` (`model`, `dtype`, `device`, `embedding_model`, `chunk_tokens`,
    `overlap_tokens`, `top_k`, `limit_bytes`, `recipe`, `system`, …). Without `model`, the one it was made
    with is used, for a new one the shipped reference model. Raises InvalidRequest for an unknown setting.
    """
    return KnowledgeBase(name, read_config(Path(home) if home else None, **settings))


def open_existing(name: str = "default", *, home: str | Path | None = None, **settings: Any) -> KnowledgeBase:
    """The same for a knowledge base that must be there: raises EmptyKnowledgeBase, and makes nothing, if it is not."""
    config = read_config(Path(home) if home else None, **settings)
    if not (_folder(name, config) / "catalog.sqlite").exists():
        others = sorted(path.parent.name for path in (config.home / "kb").glob("*/catalog.sqlite"))
        there_are = f"there are {', '.join(others)}" if others else "there is none yet"
        raise EmptyKnowledgeBase(
            f"there is no knowledge base {name!r} in {config.home} ({there_are}); `kvweave add PATH` makes one"
        )
    return KnowledgeBase(name, config)


def _place(path: str | Path) -> Path:
    """A path that a user named, absolute; an empty one would mean the working folder, which nobody means."""
    if not str(path):
        raise InvalidRequest("a path is empty; name a file or folder ('.' for this one)")
    return Path(path).expanduser().absolute()


def _folder(name: str, config: Config) -> Path:
    if not _KB_NAME.fullmatch(name):
        raise InvalidRequest(
            f"knowledge base name {name!r} is not usable: letters, digits, '.', '_' and '-', 100 at most, a letter "
            "or digit first"
        )
    return config.home / "kb" / name
