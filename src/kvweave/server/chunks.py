"""POST /v1/chunks: prepares chunks ahead of the requests that will have them as `documents`."""

from collections.abc import Iterator
from threading import Event
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from kvweave.cancellation import check_cancelled
from kvweave.results import PreparedChunks, facts
from kvweave.server.events import Encoder, collect, sse, stream
from kvweave.server.openai.fields import Document, Fields, NonEmpty, Text
from kvweave.server.running import Emit
from kvweave.server.services import services, tenant

router = APIRouter()


class ChunkFields(Fields):
    """Chunks, and what the requests will be like that have them."""

    documents: Annotated[list[Document], Field(min_length=1, max_length=10_000)]
    system: NonEmpty | None = None
    recipe: Text | None = None
    prepare: Text | None = None
    think: bool | None = None
    stream: bool | None = None


@router.post("/v1/chunks", response_class=JSONResponse)
async def prepare(request: Request, fields: ChunkFields) -> Response:
    """Prepare chunks, so that requests can reuse them in any order. With `stream`, report the progress."""
    of, parts = tenant(request), services(request)

    def work(emit: Emit, cancelled: Event) -> None:
        def progress(done: int, total: int) -> None:
            check_cancelled()
            emit((done, total))

        emit(
            of.prepare(
                [each.text for each in fields.documents],
                progress,
                system=fields.system,
                recipe=fields.recipe,
                prepare=fields.prepare,
                think=fields.think,
            )
        )

    running = parts.uploads.start(work)
    if fields.stream:
        return await stream(request, running, ChunkStream(), parts.config.server.ping_s)
    events = await collect(request, running)
    return JSONResponse({"object": "chunks.prepared", **facts(events[-1])})


class ChunkStream(Encoder):
    """Encodes the preparation of chunks as the events `progress`, `done` and `error`."""

    def event(self, event: Any) -> Iterator[bytes]:
        if isinstance(event, PreparedChunks):
            yield sse({"object": "chunks.prepared", **facts(event)}, "done")
        else:
            done, total = event
            yield sse({"done": done, "total": total}, "progress")
