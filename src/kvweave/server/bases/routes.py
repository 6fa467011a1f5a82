"""/v1/kb: knowledge bases and their documents, questions to them, and what is stored for them."""

import shutil
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from kvweave.errors import PathNotFound
from kvweave.facts import facts
from kvweave.index.documents import ListedDocument
from kvweave.knowledge_base import KnowledgeBase
from kvweave.results import AnswerCacheUse, ExplainedToken, Piece, Prefill
from kvweave.server.bases import uploads
from kvweave.server.errors import ApiError
from kvweave.server.events import collect, error_event, sse, stream
from kvweave.server.openai import replies
from kvweave.server.openai.fields import Fields, KvweaveOptions, NonEmpty, Seed, Tokens, sampling
from kvweave.server.services import ChoiceEvent, cache_use, in_thread, services, start, tenant
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.server.sources import UPLOADS_FOLDER, shown
from kvweave.types import Message

router = APIRouter(prefix="/v1/kb")

_MOST_PREDICTED: Final = 100


class NewKnowledgeBase(Fields):
    """The body that creates a knowledge base."""

    name: NonEmpty


class QuestionFields(KvweaveOptions):
    """A question, and how stored KV is reused for it."""

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
        """Return the engine's request; `defaults` are the settings of generation."""
        generation = sampling(
            defaults,
            most=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            think=self.think,
            seed=self.seed,
        )
        return CompletionRequest(
            messages=(Message("user", self.question),),
            kb=kb,
            options={**self.options(cache, generation), "drop_chunks": bool(self.drop_chunks)},
        )


@router.get("")
async def list_knowledge_bases(request: Request) -> dict[str, Any]:
    """List the knowledge bases."""
    return {"data": facts(await in_thread(tenant(request).knowledge_bases))}


@router.post("", status_code=201)
async def create(request: Request, fields: NewKnowledgeBase) -> dict[str, Any]:
    """Create a knowledge base."""
    of = tenant(request)

    def make() -> None:
        if fields.name in of.bases.names():
            raise ApiError(
                409, f"there is a knowledge base {fields.name!r} already", code="exists", param="name"
            )
        of.create(fields.name)

    await in_thread(make)
    return {"name": fields.name}


@router.delete("/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Delete a knowledge base with all that is stored for it."""
    of = tenant(request)

    def drop() -> None:
        of.delete(name)
        shutil.rmtree(of.config.home / UPLOADS_FOLDER / name, ignore_errors=True)

    await in_thread(drop)
    return {"name": name, "deleted": True}


@router.get("/{name}")
async def describe(request: Request, name: str) -> dict[str, Any]:
    """List a knowledge base's documents, how far their chunks are prepared, and what recipe `auto` stands for there."""

    def described() -> dict[str, Any]:
        with tenant(request).bases.using(name) as base:
            preparation = facts(base.preparation.status())
            preparation["by_server"] = base.config.server.idle_work and base.has_recorded_model
            documents = [_listed(each) for each in base.documents()]
            found = {"documents": documents, "preparation": preparation, "auto": facts(base.calibration())}
            return {"name": name, **found}

    return await in_thread(described)


@router.delete("/{name}/documents")
async def remove_document(
    request: Request, name: str, source: Annotated[str, Query(min_length=1)]
) -> dict[str, Any]:
    """Remove a document with all that is stored for it."""

    def remove() -> list[str]:
        with tenant(request).bases.using(name) as base:
            return uploads.remove(base, source)

    return {"removed": await in_thread(remove)}


@router.get("/{name}/documents")
async def document(
    request: Request, name: str, source: Annotated[str, Query(min_length=1)]
) -> dict[str, Any]:
    """Return a document's text; the offsets of an answer's sources count its characters, and the page marks a passage by them."""

    def read() -> dict[str, Any]:
        with tenant(request).bases.using(name) as base:
            for each in base.documents():
                if source in (each.source, shown(each.source)):
                    text = base.document_text(each.source)
                    return {"source": shown(each.source), "title": each.title, "text": text}
        raise PathNotFound(f"no document of knowledge base {name!r} is called {source!r}")

    return await in_thread(read)


@router.post("/{name}/ask", response_class=JSONResponse)
async def ask(request: Request, name: str, fields: QuestionFields) -> Response:
    """Answer a question from the documents."""
    parts = services(request)
    wanted = fields.request(name, parts.config.generation, cache_use(request))
    running = start(request, [wanted], explain=bool(fields.explain))
    if fields.stream:
        encoder = AskStream(bool(fields.explain))
        return await stream(
            request, running, encoder, parts.config.server.ping_s, replies.prompt_known, replies.headers
        )
    events = await collect(request, running)
    body = done(replies.finished(events)[0], explain=bool(fields.explain))
    return JSONResponse(body, headers=replies.headers(events))


@router.post("/{name}/explain", response_class=JSONResponse)
async def explain(request: Request, name: str, fields: QuestionFields) -> Response:
    """Answer a question, and list every token of its prompt with the origin of its KV."""
    parts = services(request)
    wanted = fields.request(name, parts.config.generation, cache_use(request))
    events = await collect(request, start(request, [wanted], explain=True))
    (finished,) = replies.finished(events)
    return JSONResponse(done(finished, explain=True), headers=replies.headers(events))


@router.get("/{name}/caches")
async def caches(request: Request, name: str) -> dict[str, Any]:
    """Return sizes by kind and tier, hit rates, and what background work has predicted."""
    of = tenant(request)

    def read() -> dict[str, Any]:
        with of.bases.using(name) as base:
            return _stored(base)

    recent = services(request).history.of(of.name, name)
    return {"name": name, **await in_thread(read), "recent": facts(recent)}


def _listed(document: ListedDocument) -> dict[str, Any]:
    described = {key: getattr(document, key) for key in ("title", "chunks", "tokens", "added_at_s", "notes")}
    same_as = shown(document.same_as) if document.same_as else ""
    return {"source": shown(document.source), **described, "same_as": same_as}


def done(finished: Finished, *, explain: bool = False) -> dict[str, Any]:
    """Return a whole answer as `ask` gives it; with `explain`, every token of its prompt too."""
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


class AskStream:
    """The events `progress`, `piece`, `done` and `error` of a question; `explain` lists the prompt's tokens in `done`."""

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

    def end(self) -> Iterator[bytes]:
        """Nothing follows `done`."""
        yield from ()

    def failed(self, error: BaseException) -> Iterator[bytes]:
        yield error_event(error, "error")


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
