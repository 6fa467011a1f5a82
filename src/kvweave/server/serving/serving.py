"""The part of a server below HTTP: the resident models and every tenant's knowledge bases.

Each request runs in a thread of its own. Every tenant has a folder with stores of its own, so no tenant can find another's data.
All tenants share the models.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from kvweave.answering.answer_stream import AnswerStream, Event
from kvweave.answering.kb_question import Asked
from kvweave.answering.pipeline import check_supported, respond
from kvweave.answering.settings import Settings
from kvweave.cancellation import cancellable, check_cancelled
from kvweave.config import Config
from kvweave.errors import Cancelled, InvalidRequest
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.models.snapshot_adapter import SnapshotAdapter
from kvweave.once import once
from kvweave.options import AskKeywords, AskOptions, Sampling, completed_sampling
from kvweave.recipes.prepare import NotPrepared
from kvweave.remote.model import preparing_model
from kvweave.results import Answer, Piece, PreparedChunks
from kvweave.server.serving.bases import ServedBases
from kvweave.server.serving.completions import (
    CompletionRequest,
    DocumentPrompt,
    Finished,
    PlainPrompt,
    Turns,
    plain_options,
)
from kvweave.server.serving.request_chunks import RequestChunks, RequestDocuments
from kvweave.server.serving.tenants import Tenants, tenant_home
from kvweave.state.knowledge_base_state import with_recorded_models
from kvweave.state.resident import ResidentModels


class Serving:
    """The resident models and the tenants of a process.

    Args:
        config: the settings. Without tenants, `home` is the folder of all knowledge bases.
        tenants: the API keys and their tenants; with None any client may use the server, and all share the home.
        idle: whether to do background work, which yields to requests, for open knowledge bases.
        kb: the knowledge base whose models are loaded if the settings name none and there are no tenants.
        share_kv, async_kv: see ResidentModels.
    """

    def __init__(
        self,
        config: Config,
        tenants: Tenants | None = None,
        *,
        idle: bool = False,
        kb: str = "default",
        share_kv: bool = True,
        async_kv: bool = True,
    ) -> None:
        self.config = config
        models = config if tenants is not None else with_recorded_models(config, kb)
        self.resident = ResidentModels(models, share_kv=share_kv, async_kv=async_kv)
        self.requests = RunningRequests()
        self._tenants = tenants
        self._idle = idle
        self._open: dict[str | None, Tenant] = {}
        self._guard = threading.Lock()
        self._ready = threading.Event()

    def load(self) -> None:
        """Load the model and the embedding model. Requests wait until then. Raises as `load_model`."""
        self.resident.load()
        self._ready.set()

    @property
    def ready(self) -> bool:
        """Whether the models are loaded and requests are taken."""
        return self._ready.is_set() and not self.requests.closing

    def tenant(self, key: str | None) -> "Tenant":
        """Return the tenant of an API key. Raises Unauthorized for a wrong key."""
        name = None if self._tenants is None else self._tenants.name_of(key)
        with self._guard:
            if name not in self._open:
                self._open[name] = Tenant(
                    name,
                    replace(self.config, home=tenant_home(self.config, name)),
                    self.resident,
                    self.requests,
                    idle=self._idle,
                )
            return self._open[name]

    def stores(self) -> list[ChunkStore]:
        """Return the open stores of all tenants."""
        with self._guard:
            tenants = list(self._open.values())
        own = [tenant.__dict__.get("store") for tenant in tenants]
        return [store for tenant in tenants for store in tenant.bases.stores()] + [
            store for store in own if store is not None
        ]

    def close(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, wait `grace_s` seconds for the running ones, cancel the rest, and close everything.

        Stored data stays. Closing twice is fine.
        """
        self.requests.close(grace_s)
        with self._guard:
            for tenant in self._open.values():
                tenant.close()
            self._open.clear()
        self.resident.close()


class RunningRequests:
    """Counts the running requests of the process, and ends them on `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.running = 0
        self.closing = False
        self.cancelled = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a request until the context ends. Raises Cancelled after `close`."""
        with self._changed:
            if self.closing:
                raise Cancelled("the server is closing")
            self.running += 1
        try:
            yield
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()

    def close(self, grace_s: float) -> None:
        """Refuse new requests, wait `grace_s` seconds for the running ones, then cancel the rest and wait for them."""
        with self._changed:
            self.closing = True
            self._changed.wait_for(lambda: not self.running, grace_s)
            self.cancelled = True
            self._changed.wait_for(lambda: not self.running)


class Tenant:
    """The knowledge bases and requests of one API key. Thread-safe. No other tenant can find its data.

    Attributes:
        name: None for the server's own home.
        config: the settings, with the tenant's home.
        bases: the tenant's knowledge bases.
    """

    def __init__(
        self,
        name: str | None,
        config: Config,
        resident: ResidentModels,
        requests: RunningRequests,
        *,
        idle: bool = False,
    ) -> None:
        self.name, self.config = name, config
        self.bases = ServedBases(config, resident, idle=idle, tenant=name)
        self._idle = idle
        self._resident, self._requests = resident, requests
        self._settings = Settings(config, config.home / "requests")

    def sampling(self, **given: Any) -> Sampling:
        """Return sampling options: the given values that are not None, and the settings for the rest."""
        return completed_sampling(self.config.generation, **given)

    def complete(
        self, request: CompletionRequest, cancelled: threading.Event | None = None
    ) -> Iterator[Event | Finished]:
        """Yield the progress of the prompt, the pieces of the answer, and at last a Finished.

        When `cancelled` is set or the iterator is closed, the request frees all its resources and stores no answer.

        Raises:
            Cancelled: `cancelled` was set, or the server is closing.
            InvalidRequest, PromptTooLong, UnknownRecipe, UnsupportedModel, KnowledgeBaseNotFound, EmptyKnowledgeBase,
            KnowledgeBaseMismatch: before the first piece.
        """
        client_cancelled = (cancelled or threading.Event()).is_set

        def stopped() -> bool:
            return client_cancelled() or self._requests.cancelled

        with self._requests.one():
            if request.kb is not None:
                with self.bases.using(request.kb) as base:
                    deleted = self.bases.closing(request.kb)
                    ask = partial(self._ask, base, request)
                    yield from self._finish(ask, lambda: stopped() or deleted())
            else:
                with self._resident.activity.request():
                    yield from self._finish(partial(self._respond, request), stopped)

    def send(
        self,
        kb: str,
        conversation: str,
        question: str,
        top_k: int | None,
        kv_budget: float | None,
        cancelled: Callable[[], bool],
    ) -> Iterator[str]:
        """Yield the answer to the next turn of a conversation. The turn is stored before the iterator ends.

        Each turn loads the conversation and stores it again. Between two turns it is not in memory and not locked, so
        `kvweave chat` and the server can continue each other's conversations. A turn that is cancelled, or whose iterator is closed
        early, is not stored.

        Raises:
            Cancelled: `cancelled` returned True.
            KnowledgeBaseNotFound, EmptyKnowledgeBase, InvalidRequest, PromptTooLong, StoreError: as `KnowledgeBase.send`.
        """
        with self.bases.using(kb) as base:
            deleted = self.bases.closing(kb)

            def stopped() -> bool:
                return cancelled() or deleted()

            # Left while the caller has a piece: cancellation belongs to the thread, which may serve another request meanwhile.
            with cancellable(stopped):
                resumed = base.conversation(conversation, kv_budget=kv_budget)
            sending = cast("Generator[str, None, None]", base.send(resumed, question, top_k=top_k))
            with resumed, closing(sending) as pieces:
                while True:
                    with cancellable(stopped):
                        check_cancelled()
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    yield piece

    def start_over(self, kb: str, conversation: str) -> None:
        """Delete the turns of a conversation. Raises KnowledgeBaseNotFound, and InvalidRequest while a process has it open."""
        with self.bases.using(kb) as base, base.conversation(conversation, new=True):
            pass

    def prepare(
        self,
        texts: Sequence[str],
        progress: Callable[[int, int], None],
        *,
        system: str | None = None,
        recipe: str | None = None,
        prepare: str | None = None,
        think: bool | None = None,
    ) -> PreparedChunks:
        """Prepare callers' chunks now, yielding to requests, so that requests can reuse them in any order.

        Args:
            texts: the chunks, exactly as requests will have them; those of a document in reading order.
            progress: called with the tokens that are done and their total.
            system: the instruction that requests will have; None is the settings'.
            recipe, prepare, think: as requests will have them; None leaves them to the settings.

        Raises:
            InvalidRequest: the chunks take more room than the store has, or the recipe prepares nothing.
            UnknownRecipe; UnsupportedModel for a model that reuses only exact prefixes.
            Cancelled: the server is closing. What was prepared stays. Also whatever `progress` raises.
        """
        with self._requests.one():
            preparing_model(self._resident.model, "preparing chunks")
            chunks = self._chunks
            assert chunks is not None
            given = AskKeywords(recipe=recipe, prepare=prepare, generation=self.sampling(think=think))
            options = self._document_options(system, given)
            chosen = self._settings.recipe_of(options)
            if chosen.prepare == NotPrepared():
                raise InvalidRequest(
                    f"recipe {chosen.name} prepares nothing; choose one that reuses chunks, such as weave or reuse"
                )
            documents = RequestDocuments(tuple(texts), options.system, options.generation.think, chosen)

            def report(done: int, total: int) -> None:
                if self._requests.cancelled:
                    raise Cancelled("the server is closing")
                progress(done, total)

            return chunks.prepare(documents, report)

    @once
    def store(self) -> ChunkStore:
        """The store for the KV of chats and of callers' documents."""
        store = ChunkStore(
            self.config.home / "requests",
            namespace="requests",
            limit_bytes=self.config.store.limit_bytes,
            host_bytes=self.config.store.host_bytes,
        )
        store.attach_device(self._resident.model.geometry.device, self.config.store.device_bytes)
        return store

    @once
    def _chunks(self) -> RequestChunks | None:
        """The preparation of callers' documents; None for a model that reuses only exact prefixes."""
        model = self._resident.model
        if isinstance(model, SnapshotAdapter):
            return None
        quiet_s = self.config.idle.idle_quiet_s if self._idle else None
        return RequestChunks(model, self._resident.encoder, self.store, self._resident.activity, quiet_s)

    def close(self) -> None:
        """Close the knowledge bases and the store. Requests must have ended."""
        self.bases.close()
        chunks = self.__dict__.get("_chunks")
        if chunks is not None:
            chunks.close()
        store = self.__dict__.get("store")
        if store is not None:
            store.close()

    def _ask(self, base: KnowledgeBase, request: CompletionRequest) -> AnswerStream:
        """Send a request to a knowledge base."""
        turns, given = Turns.of(request.messages), self._given(request)
        return base.stream(turns.question, earlier=turns.earlier, instruction=turns.instruction, **given)

    def _respond(self, request: CompletionRequest) -> AnswerStream:
        """Answer a request without a knowledge base."""
        model, settings, given = self._resident.model, self._settings, self._given(request)
        turns = Turns.of(request.messages) if request.documents else None
        if turns is None:
            options = plain_options(settings, given)
        else:
            options = self._document_options(turns.instruction, given)
        what = options, settings.recipe_of(options), settings.offload(options.kv_budget), model
        asked: Asked
        if turns is None:
            asked = PlainPrompt(*what, request)
        else:
            asked = DocumentPrompt(*what, turns, request.documents, self._prepare)
        check_supported(model, asked)
        return AnswerStream(respond(model, self.store, asked), nullcontext())

    def _given(self, request: CompletionRequest) -> AskKeywords:
        return {**request.options, "generation": request.options.get("generation") or self.sampling()}

    def _prepare(self, asked: DocumentPrompt, answer: Answer) -> None:
        """Prepare documents for later requests with another order or other documents."""
        if self._chunks is not None and asked.recipe.prepare != NotPrepared():
            options, spans = asked.options, [span for span in answer.plan.spans if span.kind == "chunk"]
            self._chunks.seen(
                RequestDocuments(
                    tuple(document.text for document in asked.documents),
                    options.system,
                    options.generation.think,
                    asked.recipe,
                    tuple(span.origin != "fresh" for span in spans),
                    answer.plan.prompt_tokens,
                )
            )

    def _document_options(self, instruction: str | None, given: AskKeywords) -> AskOptions:
        """Return the options of requests with documents: after an instruction, or that of the settings."""
        system = instruction or self.config.system or DEFAULT_SYSTEM
        without_cache: AskKeywords = {**given, "cache": "off"}
        return self._settings.options(system, **without_cache)

    def _finish(
        self, begin: Callable[[], AnswerStream], cancelled: Callable[[], bool]
    ) -> Iterator[Event | Finished]:
        """Yield a request's events and at last its Finished. Check before each step whether it was cancelled."""
        texts: list[str] = []
        with cancellable(cancelled):
            check_cancelled()
            stream = begin()
        with closing(stream):
            events = stream.events()
            while True:
                with cancellable(cancelled):
                    check_cancelled()
                    event = next(events, None)
                if event is None:
                    break
                if isinstance(event, Piece):
                    texts.append(event.text)
                    if not (event.text or event.tokens):
                        continue
                yield event
        yield self._finished(stream, "".join(texts))

    def _finished(self, stream: AnswerStream, text: str) -> Finished:
        answer = stream.answer
        plan, tokens = answer.plan, answer.timing.answer_tokens
        if plan.cache_hit is not None:
            tokens = len(self._resident.model.template.tokenize(answer.text))
        return Finished(
            answer,
            text,
            plan.prompt_tokens,
            plan.exact_tokens + plan.reused_tokens,
            tokens,
            stream.explain,
            self._resident.full_prefill_s(plan.prompt_tokens) if plan.prompt_tokens else None,
        )
