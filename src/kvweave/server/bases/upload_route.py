"""POST /v1/kb/{name}/documents: files come in, and are indexed."""

from collections.abc import Iterator
from threading import Event
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import FormData, UploadFile

from kvweave.facts import facts
from kvweave.results import AddReport
from kvweave.server.bases import uploads
from kvweave.server.errors import ApiError
from kvweave.server.events import collect, error_event, sse, stream
from kvweave.server.running import Emit
from kvweave.server.services import in_thread, services, tenant

router = APIRouter(prefix="/v1/kb")

MOST_FILES = 1000
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "string", "format": "binary"},
                        }
                    },
                }
            }
        },
    }
}


@router.post("/{name}/documents", response_class=JSONResponse, openapi_extra=_BODY)
async def upload(request: Request, name: str) -> Response:
    """Index files; with `Accept: text/event-stream`, report the progress."""
    of, parts = tenant(request), services(request)
    await in_thread(of.bases.get, name)  # an unknown name is refused before the files are read
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(
            400, "send the files as multipart/form-data, in the field `files`", code="invalid_value"
        )
    form = await request.form(max_files=MOST_FILES, max_fields=0)
    try:
        files = _files(form)
    except BaseException:
        await form.close()
        raise

    def work(emit: Emit, cancelled: Event) -> None:
        try:
            with of.bases.using(name) as base:
                emit(uploads.index(base, files, emit, cancelled))
        finally:
            for each in files:
                each.file.close()

    running = parts.uploads.start(work)
    if "text/event-stream" in request.headers.get("accept", ""):
        return await stream(request, running, UploadStream(), parts.config.server.ping_s)
    events = await collect(request, running)
    return JSONResponse(facts(events[-1]))


def _files(form: FormData) -> list[uploads.Upload]:
    found = []
    for field, value in form.multi_items():
        if field != "files" or not isinstance(value, UploadFile):
            raise ApiError(
                400,
                f"the form has the field {field!r}; files go into `files`",
                code="unknown_parameter",
                param=field,
            )
        found.append(uploads.Upload(value.filename or "", value.file))
        uploads.clean_name(found[-1].name)
    if not found:
        raise ApiError(
            400,
            "no file came; send at least one in the field `files`",
            code="missing_required_parameter",
            param="files",
        )
    return found


class UploadStream:
    """The events `progress`, `done` and `error` of an upload."""

    def event(self, event: Any) -> Iterator[bytes]:
        """Yield what one event adds."""
        if isinstance(event, AddReport):
            yield sse({"report": facts(event)}, "done")
        else:
            stage, done, total = event
            yield sse({"stage": stage, "done": done, "total": total}, "progress")

    def end(self) -> Iterator[bytes]:
        """Nothing follows `done`."""
        yield from ()

    def failed(self, error: BaseException) -> Iterator[bytes]:
        """Yield the error."""
        yield error_event(error, "error")
