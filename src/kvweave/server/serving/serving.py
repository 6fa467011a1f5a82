"""What a server serves, below HTTP: the resident models and every tenant's knowledge bases.

Each request runs in a thread of its own, as if it were alone. Nothing that a tenant stores can be found by another one: each
has its own folder with its own stores. The models are shared.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, cast

from kvweave.answering.answer_stream import AnswerStream, Event
from kvweave.answering.kb_question import Asked
from kvweave.answering.pipeline import check_supported, respond
from kvweave.answering.settings import Settings
from kvweave.cancellation import cancellable, check_cancelled
from kvweave.config import Config, GenerationConfig
from kvweave.errors import Cancelled
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.once import once
from kvweave.options import AskKeywords, AskOptions, Sampling
from kvweave.results import Piece
from kvweave.server.serving.bases import KBSummary, ServedBases
from kvweave.server.serving.completions import (
    CompletionRequest,
    DocumentPrompt,
    Finished,
    PlainPrompt,
    Turns,
    plain_options,
)
from kvweave.server.serving.request_chunks import RequestChunks
from kvweave.server.serving.tenants import Tenants, tenant_home
from kvweave.state.recorded_models import with_recorded_models
from kvweave.state.resident import ResidentModels


class Serving:
    """One per process: the resident models, and the tenants.

    Args:
        config: the settings; `home` is the folder of a server without tenants.
        tenants: who may use the server; None for any client, all in the same home.
        idle: do background work for open knowledge bases; it yields to requests.
        request_bytes: cap, for each tenant, on the stored KV of chats and of callers' documents; None leaves it as it was,
            at first 10 % of the free space, at most 20 GB.
        kb: the knowledge base whose models are loaded, where the settings name none and there are no tenants.
        share_kv, async_kv: see ResidentModels.
    """

    def __init__(
        self,
        config: Config,
        tenants: Tenants | None = None,
        *,
        idle: bool = False,
        request_bytes: int | None = None,
        kb: str = "default",
        share_kv: bool = True,
        async_kv: bool = True,
    ) -> None:
        self.config = config
        models = config if tenants is not None else with_recorded_models(config, kb)
        self.resident = ResidentModels(models, share_kv=share_kv, async_kv=async_kv)
        self.requests = RunningRequests()
        self._tenants = tenants
        self._idle, self._request_bytes = idle, request_bytes
        self._open: dict[str | None, Tenant] = {}
        self._guard = threading.Lock()
        self._ready = threading.Event()

    def load(self) -> None:
        """Load the model and the embedding model; until then requests wait for them. Raises as `load_model`."""
        self.resident.load()  # the code that a first request needs is imported above
        self._ready.set()

    @property
    def ready(self) -> bool:
        """Whether the models are loaded and requests are taken."""
        return self._ready.is_set() and not self.requests.closing

    def tenant(self, key: str | None) -> "Tenant":
        """Return the tenant of an API key; raises Unauthorized for a wrong one."""
        name = None if self._tenants is None else self._tenants.name_of(key)
        with self._guard:
            if name not in self._open:
                self._open[name] = Tenant(
                    name,
                    replace(self.config, home=tenant_home(self.config, name)),
                    self.resident,
                    self.requests,
                    idle=self._idle,
                    request_bytes=self._request_bytes,
                )
            return self._open[name]

    def stores(self) -> list[ChunkStore]:
        """Return the stores that are open, of all tenants."""
        with self._guard:
            tenants = list(self._open.values())
        own = [tenant.__dict__.get("store") for tenant in tenants]
        return [store for tenant in tenants for store in tenant.bases.stores()] + [
            store for store in own if store is not None
        ]

    def close(self, grace_s: float = 10.0) -> None:
        """Refuse new requests, let the running ones finish for so long, cancel the others, and close everything.

        Nothing that is stored is lost. Closing twice is fine.
        """
        self.requests.close(grace_s)
        with self._guard:
            for tenant in self._open.values():
                tenant.close()
            self._open.clear()
        self.resident.close()


class RunningRequests:
    """Counts the running requests of the process, and ends them when it closes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.running = 0
        self.closing = False
        self.cancelled = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a request while this lasts; raises Cancelled if none is taken any more."""
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
        """Take no more requests; wait for the running ones, and after `grace_s` cancel them."""
        with self._changed:
            self.closing = True
            self._changed.wait_for(lambda: not self.running, grace_s)
            self.cancelled = True
            self._changed.wait_for(lambda: not self.running)


class Tenant:
    """Everything of one API key; nothing of it is found by another tenant. Safe to use from many threads.

    Attributes:
        name: None for the server's own home.
        config: the settings, with the tenant's own home.
    """

    def __init__(
        self,
        name: str | None,
        config: Config,
        resident: ResidentModels,
        requests: RunningRequests,
        *,
        idle: bool = False,
        request_bytes: int | None = None,
    ) -> None:
        self.name, self.config = name, config
        self.bases = ServedBases(config, resident, idle=idle, tenant=name)
        self._idle = idle
        self._resident, self._requests = resident, requests
        self._request_bytes = request_bytes
        self._settings = Settings(config, config.home / "requests")

    # Knowledge bases

    def knowledge_bases(self) -> list[KBSummary]:
        """Return what each knowledge base holds, by name."""
        return self.bases.summaries()

    def create(self, name: str) -> KnowledgeBase:
        """Create a knowledge base; raises as `ServedBases.create`."""
        return self.bases.create(name)

    def delete(self, name: str) -> None:
        """Delete a knowledge base; raises as `ServedBases.delete`."""
        self.bases.delete(name)

    def knowledge_base(self, name: str) -> KnowledgeBase:
        """Return an open knowledge base; raises as `ServedBases.get`."""
        return self.bases.get(name)

    # Requests

    def sampling(self, **given: Any) -> Sampling:
        """Return how a request is decoded: what is given and not None, the rest from the settings."""
        defaults = {
            each.name: getattr(self.config.generation, each.name) for each in fields(self.config.generation)
        }
        return Sampling(**{**defaults, **{name: value for name, value in given.items() if value is not None}})

    def complete(
        self, request: CompletionRequest, cancelled: threading.Event | None = None
    ) -> Iterator[Event | Finished]:
        """Yield how far the prompt is, the pieces of the answer, and at last the whole.

        Once `cancelled` is set, or the iterator is closed, everything that the request holds is freed and nothing of its
        answer is stored.

        Raises:
            Cancelled: `cancelled` was set, or the server is closing.
            InvalidRequest, PromptTooLong, UnknownRecipe, UnsupportedModel, KnowledgeBaseNotFound, EmptyKnowledgeBase,
            KnowledgeBaseMismatch: before the first piece.
        """
        given_up = (cancelled or threading.Event()).is_set

        def stopped() -> bool:
            return given_up() or self._requests.cancelled

        with self._requests.one():
            if request.kb is not None:
                with self.bases.using(request.kb) as base:
                    deleted = self.bases.closing(request.kb)
                    yield from self._finish(self._ask(base, request), lambda: stopped() or deleted())
            else:
                with self._resident.activity.request():
                    yield from self._finish(self._respond(request), stopped)

    def send(
        self, kb: str, conversation: str, question: str, top_k: int | None, given_up: Callable[[], bool]
    ) -> Iterator[str]:
        """Yield the answer to the next turn of a conversation; it is stored before the iterator ends.

        Each turn resumes the conversation and stores it again. Between two turns nothing of it is in memory, and no lock is
        held. So `kvweave chat` goes on where the server left it, and the other way round. A turn that is given up, or whose
        iterator is closed, does not count.

        Raises:
            Cancelled: `given_up` returned True.
            KnowledgeBaseNotFound, EmptyKnowledgeBase, InvalidRequest, PromptTooLong, StoreError: as `KnowledgeBase.send`.
        """
        with self.bases.using(kb) as base:
            deleted = self.bases.closing(kb)

            def stopped() -> bool:
                return given_up() or deleted()

            # Not held while the caller has a piece: what cancels belongs to the thread, which may serve another request then.
            with cancellable(stopped):
                resumed = base.conversation(conversation)
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
        """Empty a conversation; raises KnowledgeBaseNotFound, and InvalidRequest while a process has it open."""
        with self.bases.using(kb) as base, base.conversation(conversation, new=True):
            pass

    @once
    def store(self) -> ChunkStore:
        """The stored KV of chats and of callers' documents."""
        store = ChunkStore(
            self.config.home / "requests",
            namespace="requests",
            limit_bytes=self._request_bytes,
            host_bytes=self.config.store.host_bytes,
        )
        store.attach_device(self._resident.model.geometry.device, self.config.store.device_bytes)
        return store

    @once
    def _chunks(self) -> RequestChunks | None:
        """Prepares callers' documents; None without background work, or for a model that reuses exact prefixes alone."""
        model = self._resident.model
        if not self._idle or not isinstance(model, Adapter):
            return None
        quiet_s = self.config.idle.idle_quiet_s
        return RequestChunks(model, self._resident.encoder, self.store, self._resident.activity, quiet_s)

    def close(self) -> None:
        """Close everything; requests have to have ended."""
        self.bases.close()
        chunks = self.__dict__.get("_chunks")
        if chunks is not None:
            chunks.close()
        store = self.__dict__.get("store")
        if store is not None:
            store.close()

    def _ask(self, base: KnowledgeBase, request: CompletionRequest) -> Callable[[], AnswerStream]:
        """Return a function that asks a knowledge base."""
        turns = Turns.of(request.messages)
        options: AskKeywords = {**request.options, "generation": self._generation(request)}
        return lambda: base.stream(
            turns.question, earlier=turns.earlier, instruction=turns.instruction, **options
        )

    def _respond(self, request: CompletionRequest) -> Callable[[], AnswerStream]:
        """Return a function that answers a request without a knowledge base."""
        generation = self._generation(request)

        def begin() -> AnswerStream:
            model, settings = self._resident.model, self._settings
            if request.documents:
                options = self._document_options(request, generation)
            else:
                options = plain_options(settings, request, generation)
            what = options, settings.recipe_of(options), settings.offload(options.kv_budget), model
            asked: Asked
            if request.documents:
                asked = DocumentPrompt(*what, Turns.of(request.messages), request.documents, self._prepare)
            else:
                asked = PlainPrompt(*what, request)
            check_supported(model, asked)
            return AnswerStream(respond(model, self.store, asked), nullcontext())

        return begin

    def _generation(self, request: CompletionRequest) -> GenerationConfig:
        return request.options.get("generation") or self.sampling()

    def _prepare(self, asked: DocumentPrompt) -> None:
        """Prepare documents for requests that have them in another order or beside others."""
        if self._chunks is not None:
            texts, options = [document.text for document in asked.documents], asked.options
            self._chunks.add(texts, options.system, asked.recipe, think=options.generation.think)

    def _document_options(self, request: CompletionRequest, generation: GenerationConfig) -> AskOptions:
        system = Turns.of(request.messages).instruction or self.config.system or DEFAULT_SYSTEM
        given: AskKeywords = {**request.options, "cache": "off", "generation": generation}
        return self._settings.options(system, **given)

    def _finish(
        self, begin: Callable[[], AnswerStream], cancelled: Callable[[], bool]
    ) -> Iterator[Event | Finished]:
        """Yield a request's events and its end; look before each step whether it was given up."""
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
