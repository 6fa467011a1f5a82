"""/v1/kb: knowledge bases, their documents, their caches, questions to them, and named conversations."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from kvweave.errors import PathNotFound
from kvweave.index.documents import ListedDocument
from kvweave.knowledge_base import KnowledgeBase
from kvweave.results import AnswerCacheUse, ExplainedToken, Piece, Prefill, facts
from kvweave.server import uploads
from kvweave.server.errors import ApiError
from kvweave.server.events import Encoder, collect, sse, stream
from kvweave.server.openai import replies
from kvweave.server.openai.fields import Fields, KVBudget, KvweaveOptions, NonEmpty, Seed, Tokens, sampling
from kvweave.server.running import Emit
from kvweave.server.services import UPLOADS_FOLDER, ChoiceEvent, cache_use, services, shown, start, tenant
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.types import Message

router = APIRouter(prefix="/v1/kb")
SourceName = Annotated[str, Query(min_length=1)]
_T = TypeVar("_T")

_MOST_PREDICTED: Final = 100


class NewKnowledgeBase(Fields):
    """The body that creates a knowledge base."""

    name: NonEmpty


class QuestionFields(KvweaveOptions):
    """A question and its options."""

    question: NonEmpty
    stream: bool | None = None
    max_new_tokens: Tokens | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    think: bool | None = None
    seed: Seed | None = None
    drop_chunks: bool | None = None
    explain: bool | None = None

    def request(self, kb: str, defaults: Any, cache: AnswerCacheUse) -> CompletionRequest:
        """Return the request to complete; `defaults` are the settings of generation."""
        decoding = ("max_new_tokens", "temperature", "top_p", "think", "seed")
        generation = sampling(defaults, **{name: getattr(self, name) for name in decoding})
        return CompletionRequest(
            messages=(Message("user", self.question),),
            kb=kb,
            options={**self.options(cache, generation), "drop_chunks": bool(self.drop_chunks)},
        )


class SearchFields(Fields):
    """The question to find passages for."""

    question: NonEmpty
    top_k: int | None = Field(None, ge=1, le=10_000)


class RejectFields(Fields):
    """The question whose cached answer is another question's."""

    question: NonEmpty


class TurnFields(SearchFields):
    """The next turn of a conversation."""

    stream: bool | None = None
    kv_budget: KVBudget | None = None


@router.get("")
async def list_knowledge_bases(request: Request) -> dict[str, Any]:
    """List the knowledge bases."""
    return {"data": await run_in_threadpool(tenant(request).bases.summaries)}


@router.post("", status_code=201)
async def create(request: Request, fields: NewKnowledgeBase) -> dict[str, Any]:
    """Create a knowledge base."""
    of = tenant(request)

    def make() -> None:
        if fields.name in of.bases.names():
            raise ApiError(409, f"knowledge base {fields.name!r} exists already", code="exists", param="name")
        of.bases.create(fields.name)

    await run_in_threadpool(make)
    return {"name": fields.name}


@router.delete("/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Delete a knowledge base with its documents, KV and answers."""
    of = tenant(request)

    def drop() -> None:
        of.bases.delete(name)
        shutil.rmtree(of.config.home / UPLOADS_FOLDER / name, ignore_errors=True)

    await run_in_threadpool(drop)
    return {"name": name, "deleted": True}


@router.get("/{name}")
async def describe(request: Request, name: str) -> dict[str, Any]:
    """Return a knowledge base's documents, the progress of its preparation, and the recipe that `auto` selects."""

    def described(base: KnowledgeBase) -> dict[str, Any]:
        preparation = facts(base.preparation.status())
        preparation["by_server"] = base.config.server.idle_work and base.components.loads_recorded_model
        documents = [_listed(each) for each in base.documents()]
        found = {"documents": documents, "preparation": preparation, "auto": facts(base.calibration())}
        return {"name": name, **found}

    return await _with_base(request, name, described)


@router.delete("/{name}/documents")
async def remove_document(request: Request, name: str, source: SourceName) -> dict[str, Any]:
    """Remove a document with its chunks, KV and answers."""
    return {"removed": await _with_base(request, name, lambda base: uploads.remove(base, source))}


@router.get("/{name}/documents")
async def document(request: Request, name: str, source: SourceName) -> dict[str, Any]:
    """Return a document's text. The offsets of an answer's sources count its characters."""

    def read(base: KnowledgeBase) -> dict[str, Any]:
        for each in base.documents():
            if source in (each.source, shown(each.source)):
                text = base.document_text(each.source)
                return {"source": shown(each.source), "title": each.title, "text": text}
        raise PathNotFound(f"knowledge base {name!r} has no document {source!r}")

    return await _with_base(request, name, read)


@router.post("/{name}/ask", response_class=JSONResponse)
async def ask(request: Request, name: str, fields: QuestionFields) -> Response:
    """Answer a question from the documents."""
    return await _answer(request, name, fields, explain=bool(fields.explain))


@router.post("/{name}/explain", response_class=JSONResponse)
async def explain(request: Request, name: str, fields: QuestionFields) -> Response:
    """Answer a question, and return every token of its prompt with the origin of its KV."""
    return await _answer(request, name, fields.model_copy(update={"stream": False}), explain=True)


async def _answer(request: Request, name: str, fields: QuestionFields, *, explain: bool) -> Response:
    wanted = fields.request(name, services(request).config.generation, cache_use(request))
    encoder = AskStream(explain) if fields.stream else None

    def body(events: Sequence[ChoiceEvent]) -> dict[str, Any]:
        (finished,) = replies.finished(events)
        return done(finished, explain=explain)

    running = start(request, [wanted], explain=explain)
    return await replies.reply(request, running, encoder, body, replies.prompt_known)


@router.post("/{name}/search")
async def search(request: Request, name: str, fields: SearchFields) -> dict[str, Any]:
    """List the passages that an answer to the question would use, best first."""
    of = tenant(request)

    def work(emit: Emit, cancelled: Event) -> None:
        with of.bases.using(name) as base:
            emit(base.passages(fields.question, fields.top_k))

    (found,) = await collect(request, services(request).questions.start(work))
    return {"data": facts(found)}


@router.post("/{name}/reject")
async def reject(request: Request, name: str, fields: RejectFields) -> dict[str, Any]:
    """Say no to the answer of another question that a question got. It never gets it again."""
    return {"rejected": await _with_base(request, name, lambda base: base.reject_answer(fields.question))}


@router.post("/{name}/conversations/{conversation}", response_class=JSONResponse)
async def send(request: Request, name: str, conversation: str, fields: TurnFields) -> Response:
    """Answer the next turn of a conversation. The first turn creates it."""
    of, parts = tenant(request), services(request)

    def work(emit: Emit, cancelled: Event) -> None:
        for piece in of.send(
            name, conversation, fields.question, fields.top_k, fields.kv_budget, cancelled.is_set
        ):
            emit(piece)

    running = parts.questions.start(work)
    if fields.stream:
        return await stream(request, running, TurnStream(), parts.config.server.ping_s)
    return JSONResponse({"answer": "".join(await collect(request, running))})


@router.delete("/{name}/conversations/{conversation}", name="delete")
async def delete_conversation(request: Request, name: str, conversation: str) -> dict[str, Any]:
    """Delete the turns of a conversation. The next turn starts over."""
    await run_in_threadpool(tenant(request).start_over, name, conversation)
    return {"name": conversation, "deleted": True}


@router.get("/{name}/caches")
async def caches(request: Request, name: str) -> dict[str, Any]:
    """Return sizes by kind and tier, hit rates, and the questions that background work has predicted."""
    stored = await _with_base(request, name, _stored)
    recent = services(request).history.of(tenant(request).name, name)
    return {"name": name, **stored, "recent": recent}


async def _with_base(request: Request, name: str, work: Callable[[KnowledgeBase], _T]) -> _T:
    """Return what `work` returns for a knowledge base; it runs in a thread."""
    of = tenant(request)

    def run() -> _T:
        with of.bases.using(name) as base:
            return work(base)

    return await run_in_threadpool(run)


def _listed(document: ListedDocument) -> dict[str, Any]:
    described = {key: getattr(document, key) for key in ("title", "chunks", "tokens", "added_at_s", "notes")}
    same_as = shown(document.same_as) if document.same_as else ""
    return {"source": shown(document.source), **described, "same_as": same_as}


def done(finished: Finished, *, explain: bool = False) -> dict[str, Any]:
    """Return the body of a finished answer; with `explain`, including every token of its prompt."""
    answer = finished.answer
    return {
        "answer": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "decoding": facts(answer.decoding),
        **replies.kvweave(finished),
        "usage": replies.usage([finished]),
        "full_prefill_estimate_s": finished.full_prefill_s,
        **({"tokens": [_token(each) for each in finished.explain()]} if explain else {}),
    }


def _token(token: ExplainedToken) -> dict[str, Any]:
    return {key: value for key, value in facts(token).items() if value is not None}


class AskStream(Encoder):
    """Encodes an answer as the events `progress`, `piece`, `done` and `error`.

    With `explain`, `done` includes every token of the prompt.
    """

    def __init__(self, explain: bool = False) -> None:
        self._explain = explain

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        event = of.event
        if isinstance(event, Prefill):
            yield sse(facts(event), "progress")
        elif isinstance(event, Piece):
            if event.text:
                yield sse({"text": event.text}, "piece")
        else:
            yield sse(done(event, explain=self._explain), "done")


class TurnStream(Encoder):
    """Encodes a turn as the events `piece`, `done` and `error`."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def event(self, piece: str) -> Iterator[bytes]:
        self._pieces.append(piece)
        yield sse({"text": piece}, "piece")

    def end(self) -> Iterator[bytes]:
        """Yield the event `done` with the complete answer; the turn is stored by then."""
        yield sse({"answer": "".join(self._pieces)}, "done")


def _stored(base: KnowledgeBase) -> dict[str, Any]:
    stats = base.store.stats()
    looked_up = stats.hits + stats.misses
    predictions, status = base.predictions.predicted.totals(), base.idle_status()
    return {
        "kv": {**facts(stats), "hit_rate": stats.hits / looked_up if looked_up else None},
        "answers": facts(base.answers.totals()),
        "predictions": {**facts(predictions), "given_per_question": predictions.given_per_question},
        "predicted_questions": facts(base.predictions.predicted.latest(_MOST_PREDICTED)),
        "background": facts(base.background_budget.totals()),
        "idle": {**facts(status), "reasons": list(status.reasons)},
    }
