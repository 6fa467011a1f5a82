"""The parts of a server that routes use, and how they get them from a request."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from time import perf_counter, time
from typing import Any, Final, Literal

from starlette.requests import Request

from kvweave.config import Config
from kvweave.documents.files import outer_file
from kvweave.results import AnswerCacheUse, Piece, Prefill
from kvweave.server.errors import ApiError
from kvweave.server.metrics import Metrics
from kvweave.server.running import Emit, RequestQueue, RunningRequest, together
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.server.serving.serving import Serving, Tenant

UPLOADS: Final = 2
"""Number of uploads indexed at once. Each uses all cores."""
UPLOADS_FOLDER: Final = "uploads"
"""The folder in a tenant's home that holds the uploaded files of each knowledge base."""
CHOICES_AT_ONCE: Final = 4
"""Number of answers of one request (`n`) generated at once."""
_PAST_QUESTIONS: Final = 500
_PAST_BASES: Final = 1000


CacheUsed = Literal["answer", "kv", "miss"]


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """An event of one of the answers that a request asks for."""

    index: int
    event: Prefill | Piece | Finished


def cache_used(event: Any) -> CacheUsed | None:
    """Return the source of an answer according to one of its events, or None if the event does not show it."""
    if isinstance(event, Finished):
        return event.cache
    if isinstance(event, Prefill) and event.cached_tokens:
        return "kv"
    return "miss" if isinstance(event, Prefill) and 0 < event.total_tokens == event.done_tokens else None


class History:
    """The last questions by tenant and knowledge base, for the page. They are kept while the server runs.

    A question has its time (seconds since 1970) and the tokens of its prompt that came from stored KV.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._past: OrderedDict[tuple[str | None, str], deque[dict[str, Any]]] = OrderedDict()

    def add(self, tenant: str | None, kb: str, finished: Finished) -> None:
        timing = finished.answer.timing
        past = {
            "at_s": time(),
            "cache": finished.cache,
            "prompt_tokens": finished.prompt_tokens,
            "cached_tokens": finished.cached_tokens,
            "ttft_s": timing.ttft_s or timing.total_s,
        }
        with self._guard:
            self._past.setdefault((tenant, kb), deque(maxlen=_PAST_QUESTIONS)).append(past)
            self._past.move_to_end((tenant, kb))
            while len(self._past) > _PAST_BASES:
                self._past.popitem(last=False)

    def of(self, tenant: str | None, kb: str) -> list[dict[str, Any]]:
        """Return the last questions of a knowledge base, oldest first."""
        with self._guard:
            return list(self._past.get((tenant, kb), ()))


class Services:
    """The parts of a running server.

    Attributes:
        questions: the queue of requests to compute.
        uploads: the queue of uploads to index.
        keyed: whether requests need a key.
        draining: whether the server is shutting down and takes no new requests.
    """

    def __init__(self, config: Config, serving: Serving, *, keyed: bool = False) -> None:
        self.config, self.serving, self.keyed, self.draining = config, serving, keyed, False
        self.history, self.started_s = History(), int(time())
        most_waiting = config.server.max_queue
        self.questions = questions = RequestQueue("question", config.server.max_running, most_waiting)
        self.uploads = uploads = RequestQueue("upload", UPLOADS, most_waiting)
        self.metrics = Metrics()
        self.metrics.watch(serving.resident)
        self.metrics.running.set_function(lambda: questions.running + uploads.running)
        self.metrics.waiting.set_function(lambda: questions.waiting + uploads.waiting)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return any(queue.running or queue.waiting for queue in (self.questions, self.uploads))

    def cancel_all(self) -> None:
        for queue in (self.questions, self.uploads):
            queue.cancel_all()

    def close(self) -> None:
        """Cancel the running requests, wait for them, and close the stores and models."""
        for queue in (self.questions, self.uploads):
            queue.close()
        self.serving.close(0.0)

    @property
    def model_name(self) -> str:
        return self.serving.resident.model.fingerprint.name

    @property
    def embedding_name(self) -> str:
        return self.serving.resident.encoder.name


def services(request: Request) -> Services:
    """Return the server's parts."""
    found: Services = request.app.state.services
    return found


def tenant(request: Request) -> Tenant:
    """Return the tenant of a request."""
    found: Tenant = request.state.tenant
    return found


def shown(source: str) -> str:
    """Return the source as clients see it: of an uploaded file, only its name."""
    folder = Path(outer_file(source)).parent
    return str(Path(source).relative_to(folder)) if folder.parent.name == UPLOADS_FOLDER else source


def cache_use(request: Request) -> AnswerCacheUse:
    """Return the use of the answer cache that a request's `Cache-Control` header asks for."""
    asked = {part.strip().lower() for part in request.headers.get("cache-control", "").split(",")}
    if "no-store" in asked:
        return "off"
    return "refresh" if "no-cache" in asked else "use"


def check_model(asked: str | None, served: str, uses: str = "has") -> None:
    """Raise ApiError (404) if a request asks for a model that is not served."""
    if asked not in (None, "", served, "kvweave", "default"):
        raise ApiError(
            404,
            f"The model `{asked}` does not exist; this server {uses} `{served}`",
            code="model_not_found",
            param="model",
        )


async def start(
    request: Request, asked: Iterable[CompletionRequest], *, explain: bool = False
) -> RunningRequest:
    """Start the generation of all answers. The events are ChoiceEvents; those of different answers may alternate.

    Answers to one prompt share its KV. The first answer computes and stores it; the others are then generated together, at most
    CHOICES_AT_ONCE at a time. This does not change any answer.

    With `explain`, compute the explanation of each answer in its thread, so that the event loop does not wait for it.
    """
    parts, of, wanted = services(request), tenant(request), tuple(_with_kb(request, each) for each in asked)
    if any(each.text is None and all(role == "system" for role, _ in each.messages) for each in wanted):
        raise ApiError(
            400, "no message has the role user; send at least one", code="invalid_value", param="messages"
        )

    arrived_s = perf_counter()

    def work(emit: Emit, cancelled: Event) -> None:
        def generate(index: int) -> None:
            each = wanted[index]
            with parts.metrics.request(perf_counter() if index else arrived_s) as observed:
                for event in of.complete(each, cancelled):
                    observed(event)
                    if isinstance(event, Finished) and each.kb is not None:
                        parts.history.add(of.name, each.kb, event)
                    if explain and isinstance(event, Finished):
                        event = _explained(event)
                    emit(ChoiceEvent(index, event))

        firsts: dict[CompletionRequest, int] = {}
        others = []
        for index, each in enumerate(wanted):
            if firsts.setdefault(replace(each, options={**each.options, "generation": None}), index) != index:
                others.append(index)
        together(generate, list(firsts.values()), CHOICES_AT_ONCE, cancelled)
        together(generate, others, CHOICES_AT_ONCE, cancelled)

    return await parts.questions.start(work)


def _with_kb(request: Request, asked: CompletionRequest) -> CompletionRequest:
    """Return the request with the knowledge base of its URL, if the request names neither documents, a text nor `kb`."""
    name = request.path_params.get("kb")
    if name is None or asked.kb is not None or asked.documents or asked.text is not None:
        return asked
    return replace(asked, kb=name)


def _explained(finished: Finished) -> Finished:
    tokens = finished.explain()
    return replace(finished, explain=lambda: tokens)
