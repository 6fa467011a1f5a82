"""A knowledge base, as users hold it: open, add, ask, stream, close.

What each call does is in a file of its own; here they are put together. Those parts that run models are imported when
first needed.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvweave.config import Config, read_config
from kvweave.engine.background import Requests
from kvweave.engine.background_budget import BackgroundBudget
from kvweave.engine.components import Components
from kvweave.engine.settings import KBIdentity, KBMetadata, Options, existing, kb_folder, place
from kvweave.engine.state import SWEEP_GRACE_S, KnowledgeBaseState, Progress, open_records
from kvweave.errors import EmptyKnowledgeBase, PathNotFound
from kvweave.index.documents import ListedDocument
from kvweave.types import AddReport, Answer, AnswerCacheUse, Prompt

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder
    from kvweave.engine.ask import AnswerStream, Questions
    from kvweave.engine.background import BackgroundReport, BackgroundRunner
    from kvweave.engine.cached_answers import CachedAnswers
    from kvweave.engine.conversation import Conversation, Conversations
    from kvweave.engine.indexing import Additions
    from kvweave.engine.settings import Choices
    from kvweave.models.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Documents:
    """What `records` lists in the knowledge base `name`; of `parts`, the index is used where there is one."""

    name: str
    records: KnowledgeBaseState
    identity: KBIdentity
    parts: Components

    def listed(self) -> list[ListedDocument]:
        """What is indexed, by source."""
        return self.records.shelf.list()

    def lost(self) -> list[str]:
        """Listed documents whose chunks the index no longer holds."""
        if not self.records.shelf.visible():
            return []
        rows = self.parts.bank.rows_by_version()
        return [d.source for d in self.listed() if rows.get(d.version, 0) < d.chunks]

    def remove(self, places: Sequence[Path]) -> list[str]:
        """Take out documents, or all under a folder; returns their sources. Raises as `KnowledgeBase.remove`."""
        sources: dict[str, None] = {}
        for path in places:
            sources.update(dict.fromkeys(self._at(path)))
        began_s = time.time()
        versions = [version for version in map(self.records.remove, sources) if version]
        if versions and self.identity.get("dimensions"):
            self.parts.bank.delete(versions, before_s=began_s)
            self.parts.bank.sweep(self.records.shelf.visible(), SWEEP_GRACE_S)
        self.records.empty_conversations()
        return [*sources]

    def remove_all(self) -> list[str]:
        """Take out everything, and forget what the knowledge base was made with.

        What another process lists from the moment of the commit on stays whole.
        """
        with self.records.database.transaction():
            removed = [document.source for document in self.listed()]
            for source in removed:
                self.records.remove(source)
            self.records.answers.clear()
            self.records.predictions.clear()
            self.identity.clear()
            self.records.store.clear()
        self.parts.forget()
        self.records.empty_conversations()
        return removed

    def _at(self, place: Path) -> list[str]:
        """The sources of a document, or of all under a folder."""
        shelf = self.records.shelf
        found = [str(place)] if shelf.get(str(place)) else shelf.sources_under(place)
        if not found:
            raise PathNotFound(
                f"nothing in knowledge base {self.name!r} comes from {place}; `kvweave ls` lists it"
            )
        return found


class KnowledgeBase:
    """Documents, their chunks and vectors, the chunk KV of one model and answers given, under one folder.

    The unit of isolation: nothing stored is shared with another knowledge base. Two processes may use one
    at once. The model and the embedding model are loaded when first needed, and so is the code that runs
    them: listing and removing documents takes neither. A context manager.
    """

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.config = config
        self.folder = kb_folder(name, config)
        self._records = open_records(self.folder, name, config)
        self.store = self._records.store
        self.answers = self._records.answers
        self.predictions = self._records.predictions
        with ExitStack() as undo:
            undo.callback(self._records.close)
            self.idle_record = BackgroundBudget(self._records.database)
            identity = KBIdentity(self._records.database, name)
            undo.pop_all()
        self._requests = Requests(self.folder / "requests.lock")
        self._terms = KBMetadata(config, identity)
        self._parts = Components(config, self.folder, identity, self._records)
        self._documents = Documents(name, self._records, identity, self._parts)

    @property
    def adapter(self) -> "Adapter":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        return self._parts.adapter

    @property
    def encoder(self) -> "TextEncoder":
        """The embedding model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        return self._parts.encoder

    # Documents

    def add(self, *paths: str | Path, progress: Progress = lambda stage, done, total: None) -> AddReport:
        """Index files and folders: read, cut, embed, compute chunk KV. Again: only what changed.

        A file that vanished from a folder named again is removed. Safe to interrupt: what was finished is
        kept, and the next `add` goes on. Raises PathNotFound, InvalidRequest, KnowledgeBaseMismatch.
        """
        places = existing(paths)
        with self._requests.arrive():
            return self._additions.add(places, progress)

    def documents(self) -> list[ListedDocument]:
        """What is indexed, by source."""
        return self._documents.listed()

    def missing_kv(self) -> int:
        """How many chunks lack KV, or what the recipe records beside it: not made yet, beyond the limit, evicted or dropped."""
        return self._additions.missing_kv()

    def lost_documents(self) -> list[str]:
        """Listed documents whose chunks the index no longer holds: a folder was deleted, a disk failed."""
        return self._documents.lost()

    def remove(self, *paths: str | Path) -> list[str]:
        """Take out documents, or all under a folder; returns their sources.

        At the commit none of their chunks, vectors or KV can be found any more, and conversations that have read
        them begin anew. Raises PathNotFound for a path from which nothing is indexed, before anything is removed.
        """
        return self._documents.remove([place(path) for path in paths])

    def remove_all(self) -> list[str]:
        """Empty the knowledge base; it may then be filled anew with another model."""
        return self._documents.remove_all()

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
        bank: AnswerCacheUse = "serve",
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
            bank=bank,
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
        bank: AnswerCacheUse = "serve",
    ) -> "AnswerStream":
        """Answer piece by piece: iterate for the text; `.answer` holds the whole once the iteration ends.

        `recipe` names how stored KV is reused, `prepare` how chunks were prepared, where not as the recipe would.
        `ratio` 0..1 is the share of stale context tokens to recompute; instead, `coverage` 0..1 recomputes as few as
        hold that share of the selector's scores. `top_k` is the number of chunks; `drop_chunks` leaves out the
        lowest-ranked ones if the prompt is too long. `bank`: "serve" gives an earlier answer where the same question was
        asked before, "renew" answers anew and keeps that, "ignore" is for what the question alone does not say: a turn
        of a conversation, a measurement.
        Raises EmptyKnowledgeBase, InvalidRequest, UnknownRecipe, KnowledgeBaseMismatch; PromptTooLong comes
        with the first piece.
        """
        options = Options(recipe, prepare, ratio, coverage, top_k, drop_chunks, bank)
        arrival = self._requests.arrive()  # idle work gives way from here on, while code is imported too
        try:
            return self._questions.stream(question, options, arrival)
        except BaseException:
            arrival.leave()
            raise

    def prompt(self, question: str, *, top_k: int | None = None) -> Prompt:
        """What the question would be answered from, and nothing computed: its chunks in prompt order.

        Raises EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch.
        """
        return self._questions.prompt(question, top_k)

    def refresh_answers(self, progress: Progress = lambda stage, done, total: None) -> int:
        """See which banked answers newer documents have overtaken, and forget those; returns how many.

        None of them is given before that either: this only finds out ahead of time whose questions need an answer,
        which `answers.waiting` lists from then on. Safe to interrupt.
        """
        return self._repeats.refresh(progress)

    # Conversations

    def conversation(self, name: str = "default", *, new: bool = False) -> "Conversation":
        """A conversation by name, gone on with where it was left, or begun anew; close it to keep it.

        Its KV lies beside the knowledge base and is decoded on by the settings' `kv_budget` and `resident_bytes`. Raises
        InvalidRequest for an unusable name, a conversation that another process is having, or one that began with
        another model or budget. One that has read a document which was removed or changed since begins anew, and says
        so in the log.
        """
        return self._conversations.open(name, new=new)

    def say(self, conversation: "Conversation", question: str, *, top_k: int | None = None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn, from chunks found for it and from all that was said before.

        Raises EmptyKnowledgeBase and InvalidRequest, and as `Conversation.say`.
        """
        with self._requests.arrive():
            yield from self._conversations.say(conversation, question, top_k)

    # Idle time

    def idle(self, progress: Progress = lambda stage, done, total: None) -> "BackgroundReport":
        """Do now what is otherwise done at idle time: true answers, predicted questions, conversions.

        Ends when nothing is left to do, or the day's budget is spent, or, by the settings, on battery. Gives way to
        requests in this process and others. Safe to interrupt.
        """
        return self._idle_time.run(progress)

    def watch_idle(self, stop: threading.Event, progress: Progress = lambda stage, done, total: None) -> None:
        """Do the same whenever nobody has asked anything for a while, until `stop` is set; for a thread of its own."""
        self._idle_time.watch(stop, progress)

    # Its end

    def close(self) -> None:
        """Write counters and close files; using the object afterwards raises StoreError. Closing twice is fine."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What these calls go to: made when first needed, since the code that runs models comes with it

    @cached_property
    def _choices(self) -> "Choices":
        from kvweave.engine.settings import Choices

        return Choices(self.config, self.folder)

    @cached_property
    def _additions(self) -> "Additions":
        from kvweave.engine.indexing import Additions

        own_folder = self.folder.parent
        return Additions(self._records, self._parts, self._choices, self._terms, own_folder)

    @cached_property
    def _repeats(self) -> "CachedAnswers":
        from kvweave.engine.cached_answers import CachedAnswers

        threshold = self.config.answers.answer_threshold
        return CachedAnswers(
            self.answers, self._records.shelf, lambda: self._parts.bank, threshold, self.predictions
        )

    @cached_property
    def _questions(self) -> "Questions":
        from kvweave.engine.ask import Questions

        return Questions(
            self.name,
            self._records.shelf,
            self._parts,
            self._repeats,
            self._choices,
            self._terms,
        )

    @cached_property
    def _conversations(self) -> "Conversations":
        from kvweave.engine.conversation import Conversations

        return Conversations(
            self._records.conversations,
            self._records.shelf,
            self.store,
            self._parts,
            self._choices,
            self._terms,
            self._questions.found,
        )

    @cached_property
    def _idle_time(self) -> "BackgroundRunner":
        from kvweave.engine.background import BackgroundRunner
        from kvweave.engine.background_jobs import IdleSetup

        setup = IdleSetup(
            self._records,
            self._parts,
            self._repeats,
            self._choices,
            self._terms,
            self.idle_record,
            self.config.prediction,
        )
        lock = self.folder / "idle.lock"
        return BackgroundRunner(
            setup.work, lambda: self.adapter, self._requests, self.idle_record, lock, self.config.idle
        )


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
    if not (kb_folder(name, config) / "catalog.sqlite").exists():
        others = sorted(path.parent.name for path in (config.home / "kb").glob("*/catalog.sqlite"))
        there_are = f"there are {', '.join(others)}" if others else "there is none yet"
        raise EmptyKnowledgeBase(
            f"there is no knowledge base {name!r} in {config.home} ({there_are}); `kvweave add PATH` makes one"
        )
    return KnowledgeBase(name, config)
