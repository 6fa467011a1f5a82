"""POST /v1/responses, for text; nothing is stored, so a response cannot be fetched or continued later."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kvweave.server.events import collect, stream
from kvweave.server.openai import replies
from kvweave.server.openai.response_events import ResponseStream
from kvweave.server.openai.response_fields import ResponseFields
from kvweave.server.openai.response_object import ResponseObject
from kvweave.server.services import cache_use, check_model, services, start

router = APIRouter()


@router.post("/v1/responses", response_class=JSONResponse)
async def responses(request: Request, fields: ResponseFields) -> Response:
    """Answer an input."""
    check_model(request, fields.model)
    parts = services(request)
    built = ResponseObject(fields, parts.model_name)
    running = start(request, [fields.request(parts.config.generation, cache_use(request))])
    if fields.stream:
        return await stream(
            request,
            running,
            ResponseStream(built),
            parts.config.server.ping_s,
            replies.cache_known,
            replies.headers,
        )
    events = await collect(request, running)
    (finished,) = replies.finished(events)
    body: dict[str, Any] = built.finished(finished, replies.tokens(events, 0))
    return JSONResponse(body, headers=replies.headers(events))
