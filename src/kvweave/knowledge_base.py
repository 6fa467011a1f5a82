"""A knowledge base as users hold it: open, add, ask, stream, close.

Here the parts of a knowledge base are put together; each call goes to a file of its own. Code that runs models is
imported when first needed, so that listing and removing documents stays light.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from kvweave.config import Config, read_config
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch, PathNotFound
from kvweave.index.documents import ListedDocument
from kvweave.once import once
from kvweave.options import AskKeywords
from kvweave.results import AddReport, Answer, FoundPassage, PrepareReport, Source
from kvweave.state.active_requests import ActiveRequests, RequestGuard
from kvweave.state.components import Components
from kvweave.state.knowledge_base_state import (
    SWEEP_GRACE_S,
    KnowledgeBaseState,
    Progress,
    existing_kbs,
    existing_paths,
    kb_folder,
    no_progress,
    sources_from,
)
from kvweave.state.metadata import KBMetadata
from kvweave.types import Message, Prompt, QuestionContext

if TYPE_CHECKING:
    from kvweave.answering.answer_stream import AnswerStream
    from kvweave.answering.ask import Asker
    from kvweave.answering.cached_answers import CachedAnswers
    from kvweave.answering.settings import Settings
    from kvweave.background.conditions import IdleStatus, MachineState
    from kvweave.background.runner import BackgroundReport, BackgroundRunner
    from kvweave.chat import Conversation, Conversations
    from kvweave.documents.chunk_preparation import ChunkPreparer
    from kvweave.documents.indexing import Indexer
    from kvweave.embedding import TextEncoder
    from kvweave.kvstore.chunk_store import ChunkStore
    from kvweave.models.adapter import Adapter
    from kvweave.remote.model import AnyModel
    from kvweave.state.calibration_results import AutoRecipe, Calibration, CalibrationResult
    from kvweave.state.resident import ResidentModels


class KnowledgeBase:
    """Documents, their chunks and vectors, the chunk KV of one model and the answers given, in one folder.

    It is the unit of isolation: nothing stored is shared with another knowledge base. Two processes may use one at
    once, and several threads one object. The model and the embedding model are loaded when first needed. A context manager.

    `resident` gives the models that all knowledge bases of the process share; its users are one another's requests, to
    which background work yields. `namespace` names its entries in a shared tier, in place of its own name.

    Attributes:
        state: its tables.
        components: its models and its index.
        requests: the running requests of this process and of others.
        metadata: what it was made with.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        resident: "ResidentModels | None" = None,
        namespace: str | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.folder = kb_folder(name, config)
        self.state = KnowledgeBaseState(self.folder, name, config, namespace)
        self.answers = self.state.answers
        self.predictions = self.state.predictions
        self.background_budget = self.state.background_budget
        self.preparation = self.state.preparation
        with ExitStack() as undo:
            undo.callback(self.state.close)
            self.metadata = KBMetadata(self.state.database, name, config)
            undo.pop_all()
        activity = None if resident is None else resident.activity
        self.requests = ActiveRequests(self.folder / "requests.lock", activity)
        self.components = Components(config, self.folder, self.metadata, self.state, resident)

    @property
    def store(self) -> "ChunkStore":
        """The store of chunk KV."""
        return self.state.store

    @property
    def model(self) -> "AnyModel":
        """The model; raises KnowledgeBaseMismatch if the knowledge base was made with another."""
        return self.components.model

    @property
    def adapter(self) -> "Adapter":
        """The model; raises as `model`, and UnsupportedModel if stored KV cannot be placed in it."""
        return self.components.adapter

    @property
    def encoder(self) -> "TextEncoder":
        """The embedding model; raises as `model`."""
        return self.components.encoder

    # Documents

    def add(
        self,
        *paths: str | Path,
        progress: Progress = no_progress,
        wait: bool = True,
        only: Set[Path] | None = None,
        allow_empty: bool = False,
    ) -> AddReport:
        """Index what is new or changed in files and folders: read, chunk, embed, compute chunk KV.

        A document is removed if its file vanished from a folder given again, or was moved to a path given now. If the folder has no
        files at all any more, its disk may not be mounted: its documents are kept and reported. Safe to interrupt: finished work is
        kept, and the next `add` continues.

        Args:
            paths: files and folders.
            progress: see `Progress`.
            wait: return when chunk KV is computed too. Otherwise return once the documents can be asked about, and leave the
                rest to `prepare`, a server's idle time or `kvweave add`.
            only: absolute paths of the files that may have changed; None if any may.
            allow_empty: remove the documents of a folder without files, too.

        Raises PathNotFound, InvalidRequest, KnowledgeBaseMismatch.
        """
        existing = existing_paths(paths)
        with self.requests.start():
            return self._indexer.add(existing, progress, wait=wait, only=only, allow_empty=allow_empty)

    def prepare(self, progress: Progress = no_progress, *, wait: bool = True) -> PrepareReport:
        """Compute the chunk KV that is missing, yielding to requests.

        With `wait`, wait for another process that prepares them, else leave the work to that process. Safe to interrupt. Raises
        StoreReadOnly.
        """
        self.state.database.check_writable()
        guard = RequestGuard(self.requests, 0.0, threading.Event())
        return self.preparer.work(guard, progress, wait=wait)

    def documents(self) -> list[ListedDocument]:
        """Return the indexed documents, by source."""
        return self.state.documents.all_documents()

    def missing_kv(self) -> int:
        """Return how many chunks lack KV or features that the recipe needs."""
        return self.preparer.missing() if self.state.documents.visible_versions() else 0

    def lost_documents(self) -> list[str]:
        """Return listed documents whose chunks the index has lost."""
        if not self.state.documents.visible_versions():
            return []
        rows = self.components.index.rows_by_version()
        return [d.source for d in self.documents() if rows.get(d.version, 0) < d.chunks]

    def remove(self, *paths: str | Path) -> list[str]:
        """Remove documents, or all under a folder; return their sources.

        After the commit none of their chunks, vectors, KV or answers can be found. Conversations that have read them
        start over.

        Raises PathNotFound if nothing is indexed from a path; then nothing is removed.
        """
        found = partial(sources_from, self.name, self.state.documents)
        sources = list(dict.fromkeys(source for path in paths for source in found(path)))
        began_s = time.time()
        versions = [version for version in map(self.state.remove, sources) if version]
        if versions and self.metadata.get("dimensions"):
            self.components.index.delete(versions, before_s=began_s)
            self.components.index.sweep(self.state.documents.visible_versions(), SWEEP_GRACE_S)
        self.state.forget_removed_text()
        return sources

    def remove_all(self) -> list[str]:
        """Empty the knowledge base, so that another model may fill it; return the removed sources.

        What another process adds after the commit stays whole.
        """
        store = self.store
        with self.state.database.transaction():
            removed = [document.source for document in self.documents()]
            for source in removed:
                self.state.remove(source)
            self.answers.clear()
            self.predictions.clear()
            self.state.calibrations.clear()
            self.metadata.clear()
            store.clear()
        self.components.forget()
        self.state.forget_removed_text()
        return removed

    def follow(
        self,
        *folders: str | Path,
        stop: threading.Event | None = None,
        progress: Progress = no_progress,
        allow_empty: bool = False,
    ) -> Iterator[AddReport]:
        """Add the folders, then watch them: yield a report of each until `stop` is set; see `add`, `documents.file_watch.follow`."""
        from kvweave.documents.file_watch import follow

        return follow(partial(self.add, allow_empty=allow_empty), self.folder.parent, folders, stop, progress)

    def document_text(self, source: str) -> str:
        """Return the text of a document as it was indexed; what no chunk covers, such as blank lines, comes back as line ends.

        Raises PathNotFound if the knowledge base lists no such document.
        """
        version = next((each.version for each in self.documents() if each.source == source), None)
        if version is None:
            raise PathNotFound(f"no document of knowledge base {self.name!r} is called {source!r}")
        return text_of_passages(self.components.index.passages(version))

    # Questions

    def passages(self, question: str, top_k: int | None = None) -> tuple[Source, ...]:
        """Return the chunks that a question would be answered from, best first; loads no language model.

        Raises as `prompt`.
        """
        from kvweave.answering.kb_question import sources_of

        return sources_of(self.state.documents, self._asker.ranked(question, top_k))

    def explained_passages(self, question: str, top_k: int | None = None) -> tuple[FoundPassage, ...]:
        """Return the same with the reason why each was found; raises as `prompt`."""
        from kvweave.answering.kb_question import explained, sources_of

        found = self._asker.ranked(question, top_k)
        return explained(question, found, sources_of(self.state.documents, found))

    def ask(self, question: str, **options: Unpack[AskKeywords]) -> Answer:
        """Answer a question from the documents; see `stream` for the options and errors."""
        with self.requests.start():  # background work stops from here on, while code is imported too
            from kvweave.answering.answer_stream import Answered

            *_, whole = self._asker.events(question, **options)
        assert isinstance(whole, Answered)  # the last event
        return whole.answer

    def stream(
        self,
        question: str,
        *,
        earlier: Sequence[Message] = (),
        instruction: str = "",
        **options: Unpack[AskKeywords],
    ) -> "AnswerStream":
        """Answer piece by piece: iterate for the text, then read `.answer`.

        Args:
            question: the question.
            recipe: how stored KV is reused; None is the settings' recipe.
            prepare: how chunks were prepared, where not as the recipe does it.
            ratio: share of the stale context tokens to recompute, 0..1.
            coverage: instead of a ratio: recompute the fewest tokens that hold this share of all scores, 0..1.
            top_k: the number of chunks to retrieve.
            drop_chunks: leave out the lowest-ranked chunks if the prompt is too long.
            kv_budget: KV entries that a decoded token attends to, see `OffloadSettings`; None is the settings' budget.
            cache: "use" returns a cached answer and stores a new one, "refresh" computes and stores it again, "off" does
                neither.
            generation: how this answer is decoded, in place of the settings' way. One that is sampled, stopped, cut or with log
                probabilities is not kept as the answer.
            earlier, instruction: the earlier messages, and a further instruction; see `Prompt`. Either turns the cache off.

        Raises:
            EmptyKnowledgeBase, InvalidRequest, UnknownRecipe, KnowledgeBaseMismatch: at once.
            PromptTooLong: with the first piece.
        """
        request = self.requests.start()  # first of all, as in `ask`
        try:
            from kvweave.answering.answer_stream import AnswerStream

            events = self._asker.events(question, QuestionContext(tuple(earlier), instruction), **options)
            return AnswerStream(events, request)
        except BaseException:
            request.close()
            raise

    def prompt(self, question: str, *, top_k: int | None = None) -> Prompt:
        """Return the prompt of a question, with its chunks in order; nothing is computed.

        Raises EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch.
        """
        return self._asker.prompt(question, top_k)

    def refresh_answers(self, progress: Progress = no_progress) -> int:
        """Drop the cached answers that newer documents have made invalid; return how many.

        An invalid answer is never given, with or without this call; `answers.pending` then lists the questions that
        need a new one. Safe to interrupt.
        """
        return self._cached_answers.refresh(progress)

    def reject_answer(self, question: str) -> list[str]:
        """Say no to the cached answer of another question that this one got; return the questions whose answer it got.

        It is never given to this question again, and the model has to be surer of such questions from then on. Raises
        InvalidRequest if the question got no answer of another one.
        """
        with self.answers.transaction():
            rejected = self.answers.reject(question)
            self.predictions.predicted.record_rejection(rejected)
        if not rejected:
            raise InvalidRequest(
                f"{question!r} got no answer of another question, so there is none to reject; to compute its answer again, use "
                "`kvweave ask --fresh`"
            )
        return rejected

    def judging(self) -> str:
        """Return one line that says whether questions in other words get cached answers, and why; loads no model."""
        from kvweave.state.judge import UNFITTED, JudgeFits

        bound, digest = self.config.answers.answer_error_bound, self.metadata.get("model_digest")
        if not bound:
            return "none: answer_error_bound is 0"
        fit = JudgeFits(self.config.home).find(digest) if digest else None
        return UNFITTED if fit is None else fit.summary(bound, self.answers.rejected_scores())

    # Conversations

    def conversation(
        self, name: str = "default", *, new: bool = False, kv_budget: float | None = None
    ) -> "Conversation":
        """Open a conversation: resume it where it was left, or start over. Close it to keep it.

        Its KV is stored beside the knowledge base and decoded under `kv_budget`, or the settings' if that is None, and the
        settings' `resident_bytes`. A conversation keeps the budget it began with, and none need be given then. A conversation that has read a document which was removed or changed since starts over, with a warning.

        Raises:
            InvalidRequest: an unusable name; another process has the conversation open; it began with another model or
                budget.
        """
        return self._conversations.open(name, new=new, kv_budget=kv_budget)

    def send(self, conversation: "Conversation", question: str, *, top_k: int | None = None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn, piece by piece, from new chunks and all said before.

        The first question is answered from the answer cache if that has an answer. Raises EmptyKnowledgeBase and
        InvalidRequest, and as `Conversation.send`.
        """
        with self.requests.start():
            yield from self._conversations.send(conversation, question, top_k)

    # Background work

    def idle(self, progress: Progress = no_progress, *, low_load: bool = False) -> "BackgroundReport":
        """Do the background work now, until nothing is left or the day's budget is spent.

        By the settings it ends on battery too; with `low_load` also when other programs need the machine. Yields to requests
        of this process and others. Safe to interrupt.
        """
        return self._background.run(progress, low_load=low_load)

    def watch_idle(self, stop: threading.Event, progress: Progress = no_progress) -> None:
        """Do the background work whenever the machine is idle, until `stop` is set; for its own thread."""
        self._background.watch(stop, progress)

    def idle_status(self, machine: "MachineState | None" = None) -> "IdleStatus":
        """Return the cost and use of background work, and whether it may run now; `machine` defaults to this machine."""
        from kvweave.background.conditions import idle_status

        return idle_status(self.state, self.config.idle, machine)

    # Calibration

    def calibrate(
        self,
        questions: Sequence[str] | None = None,
        progress: Progress = no_progress,
    ) -> "CalibrationResult":
        """Find the cheapest budget that keeps what full attention answers; recipe `auto` then resolves to it.

        `questions` are taken in place of those that users asked and that were predicted. Then the KV that the choice needs is
        computed. Safe to interrupt: what was measured is kept, and the next call continues, unless documents change before.

        Raises EmptyKnowledgeBase, UnsupportedModel, KnowledgeBaseMismatch, StoreReadOnly; InvalidRequest if there are too few
        questions, or another process is at background work.
        """
        from kvweave.background.calibration import calibrate

        self._asker.checked("?")
        with self.requests.start():
            self.preparer.embed(progress)
            return calibrate(self.state, self.components, self._settings, questions, progress)

    def calibration(self) -> "Calibration":
        """Return the recipe that `auto` resolves to now, and the reason; loads no model."""
        from kvweave.state.calibration_results import Calibration

        try:
            return self.auto.now()
        except KnowledgeBaseMismatch as error:
            return Calibration(None, f"since nothing was calibrated for these settings: {error}")

    # Closing

    def close(self) -> None:
        """Write counters and close files. Using the object afterwards raises StoreError; closing twice is fine."""
        self.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Parts that run models, made and imported when first needed

    @once
    def _settings(self) -> "Settings":
        from kvweave.answering.settings import Settings

        return Settings(self.config, self.folder, self.auto)

    @once
    def auto(self) -> "AutoRecipe":
        """Resolves the recipe `auto`."""

        from kvweave.state.calibration_results import AutoRecipe

        return AutoRecipe(self.state.calibrations, self.config, self.metadata, lambda: self.answers.epoch)

    @once
    def _indexer(self) -> "Indexer":
        from kvweave.documents.indexing import Indexer

        return Indexer(
            self.state,
            self.components,
            self.metadata,
            self.preparer,
            self.folder.parent,
        )

    @once
    def preparer(self) -> "ChunkPreparer":
        """Computes missing vectors and chunk KV."""

        from kvweave.documents.chunk_preparation import ChunkPreparer

        return ChunkPreparer(self.state, self.components, self._settings, self.metadata, self.preparation)

    @once
    def _cached_answers(self) -> "CachedAnswers":
        from kvweave.answering.cached_answers import CachedAnswers

        return CachedAnswers(
            self.answers,
            self.state.documents,
            lambda: self.components.index,
            self.config.answers.answer_threshold,
            self.predictions,
            self.config.retrieval.reranker,
            self.background_budget,
            error_bound=self.config.answers.answer_error_bound,
        )

    @once
    def _asker(self) -> "Asker":
        from kvweave.answering.ask import Asker

        return Asker(self.name, self.components, self._cached_answers, self._settings, self.metadata)

    @once
    def _conversations(self) -> "Conversations":
        from kvweave.chat import Conversations

        return Conversations(self.state, self._asker)

    @once
    def _background(self) -> "BackgroundRunner":
        from kvweave.background.runner import BackgroundRunner

        return BackgroundRunner(self.state, self._asker, self.requests, self.preparer)


def text_of_passages(passages: Iterable[tuple[int, str]]) -> str:
    """Return the text that has each passage at its offset; `passages` in reading order, they may overlap."""
    text = ""
    for start, passage in passages:
        text = text[:start] + "\n" * (start - len(text)) + passage + text[start + len(passage) :]
    return text


def open_knowledge_base(
    name: str = "default", *, home: str | Path | None = None, **settings: Any
) -> KnowledgeBase:
    """Open a knowledge base, creating it if it is not there.

    `settings` are those of `kvweave.config`, such as `model` and `top_k`. Without `model`, the one that the knowledge
    base was made with is used, for a new one the shipped reference model.

    A process that is forked afterwards cannot use it, and gets StoreError: open it in each process after the fork.

    Raises InvalidRequest for an unknown setting.
    """
    return KnowledgeBase(name, read_config(Path(home) if home else None, **settings))


def open_existing(name: str = "default", *, home: str | Path | None = None, **settings: Any) -> KnowledgeBase:
    """Open a knowledge base that must be there: raises EmptyKnowledgeBase, and creates nothing, if it is not."""
    config = read_config(Path(home) if home else None, **settings)
    if not (kb_folder(name, config) / "catalog.sqlite").exists():
        raise EmptyKnowledgeBase(
            f"there is no knowledge base {name!r} in {config.home} ({existing_kbs(config)}); `kvweave add PATH` makes one"
        )
    return KnowledgeBase(name, config)
