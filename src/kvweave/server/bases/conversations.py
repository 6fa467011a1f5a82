"""/v1/kb/{name}/conversations: turns of a named conversation; and /v1/kb/{name}/search."""

from collections.abc import Iterator
from threading import Event
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from kvweave.facts import facts
from kvweave.server.events import Encoder, collect, sse, stream
from kvweave.server.openai.fields import Fields, NonEmpty
from kvweave.server.running import Emit, RunningRequest
from kvweave.server.services import services, tenant

router = APIRouter(prefix="/v1/kb/{name}")


class SearchFields(Fields):
    """The question to find passages for."""

    question: NonEmpty
    top_k: int | None = Field(None, ge=1, le=10_000)


class TurnFields(SearchFields):
    """The next turn of a conversation."""

    stream: bool | None = None


@router.post("/search")
async def search(request: Request, name: str, fields: SearchFields) -> dict[str, Any]:
    """List the passages that an answer to the question would use, best first."""
    of = tenant(request)

    def work(emit: Emit, cancelled: Event) -> None:
        with of.bases.using(name) as base:
            emit(base.passages(fields.question, fields.top_k))

    (found,) = await collect(request, services(request).questions.start(work))
    return {"data": facts(found)}


@router.post("/conversations/{conversation}", response_class=JSONResponse)
async def send(request: Request, name: str, conversation: str, fields: TurnFields) -> Response:
    """Answer the next turn of a conversation. The first turn creates it."""
    parts, running = services(request), _start(request, name, conversation, fields)
    if fields.stream:
        return await stream(request, running, TurnStream(), parts.config.server.ping_s)
    return JSONResponse({"answer": "".join(await collect(request, running))})


@router.delete("/conversations/{conversation}")
async def delete(request: Request, name: str, conversation: str) -> dict[str, Any]:
    """Delete the turns of a conversation. The next turn starts over."""
    await run_in_threadpool(tenant(request).start_over, name, conversation)
    return {"name": conversation, "deleted": True}


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


async def _start(request: Request, kb: str, conversation: str, fields: TurnFields) -> RunningRequest:
    of = tenant(request)

    def work(emit: Emit, cancelled: Event) -> None:
        for piece in of.send(kb, conversation, fields.question, fields.top_k, cancelled.is_set):
            emit(piece)

    return await services(request).questions.start(work)
