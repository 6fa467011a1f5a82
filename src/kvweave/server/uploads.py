"""POST /v1/kb/{name}/documents: stores and indexes uploaded files.

A file stays under `uploads` in the tenant's home, so that it can be indexed again. Its source is its path there; clients
see only its name.
"""

import re
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from kvweave.cancellation import check_cancelled
from kvweave.documents.files import free_name
from kvweave.documents.reader_process import FileReader
from kvweave.errors import DocumentError, InvalidRequest, MissingExtra, PathNotFound
from kvweave.files import is_abandoned, sync_folder, temporary_name, write_atomically
from kvweave.knowledge_base import KnowledgeBase
from kvweave.results import AddReport, SkippedFile, facts
from kvweave.server.errors import ApiError
from kvweave.server.events import Encoder, collect, sse, stream
from kvweave.server.running import Emit
from kvweave.server.services import UPLOADS_FOLDER, services, shown, tenant

router = APIRouter(prefix="/v1/kb")

MOST_FILES = 1000
_FILES: Final = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
_FORM: Final = {"schema": {"type": "object", "required": ["files"], "properties": {"files": _FILES}}}
_BODY: Final = {"requestBody": {"required": True, "content": {"multipart/form-data": _FORM}}}
_LONGEST_NAME_BYTES: Final = 200
_COPIED_BYTES: Final = 1 << 20
_UNUSABLE: Final = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff<>:"|?*]'
)


def clean_name(given: str) -> str:
    """Return a safe file name: without a path, leading dots or invisible characters.

    Raises InvalidRequest if nothing is left.
    """
    last = given.replace("\\", "/").rpartition("/")[2]
    name = _UNUSABLE.sub("", unicodedata.normalize("NFC", last)).strip().lstrip(".").strip()
    stem, dot, suffix = name.rpartition(".")
    if dot and len(suffix.encode()) <= 16:
        room = _LONGEST_NAME_BYTES - len(suffix.encode()) - 1
        name = f"{_shortened(stem, room)}.{suffix}"
    else:
        name = _shortened(name, _LONGEST_NAME_BYTES)
    if not name:
        raise InvalidRequest(f"{given!r} is not a usable file name")
    return name


def index(base: KnowledgeBase, uploads: Sequence[UploadFile], emit: Emit) -> dict[str, Any]:
    """Store files and index them, and return the report; call `emit` with (stage, done, total).

    Files without usable text are not kept. If the knowledge base has an earlier version of such a file, it keeps that version. Chunk KV
    is computed while the server is idle, unless the setting `wait` is on or `idle_work` is off.
    """
    folder = upload_folder(base)
    _sweep(folder)
    wait = base.config.wait or not base.config.server.idle_work
    paths: list[Path] = []
    skipped: list[SkippedFile] = []

    def progress(stage: str, done: int, total: int) -> None:
        check_cancelled()
        emit((stage, done, total))

    try:
        with FileReader() as reader:
            for number, upload in enumerate(uploads):
                progress("storing", number, len(uploads))
                taken = [path.name for path in paths]
                paths.append(folder / free_name(clean_name(upload.filename or ""), taken))
                if why := _store(upload, paths[-1], reader):
                    skipped.append(SkippedFile(paths[-1], f"{why}; its earlier version stays"))
            report = base.add(*paths, progress=progress, wait=wait)
            return _shown_facts(replace(report, skipped=(*skipped, *report.skipped)))
    finally:
        listed = {document.source for document in base.documents()}
        for path in paths:
            if str(path) not in listed:
                path.unlink(missing_ok=True)


def _store(upload: UploadFile, path: Path, reader: FileReader) -> str:
    """Store a file. If it would replace a readable file and has no usable text, keep that file and return why."""
    upload.file.seek(0)
    parts = iter(partial(upload.file.read, _COPIED_BYTES), b"")
    if not path.exists():
        write_atomically(path, parts)
        return ""
    aside = temporary_name(path)
    try:
        new = aside / path.name
        write_atomically(new, parts)
        if not any(each.text.strip() for each in reader.read(new).documents):
            return "there is no text in the file"
        new.replace(path)
        sync_folder(path.parent)
    except (DocumentError, MissingExtra) as error:
        return str(error)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ""


def _sweep(folder: Path) -> None:
    """Delete the files that killed processes have left while they stored uploads."""
    for path in filter(is_abandoned, folder.glob("*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(base: KnowledgeBase, source: str) -> list[str]:
    """Remove the document with this source or name, and its file if it was uploaded. Raises PathNotFound."""
    found = [each.source for each in base.documents() if source in (each.source, shown(each.source))]
    if not found:
        raise PathNotFound(f"knowledge base {base.name!r} has no document {source!r}")
    base.remove(*found)
    for each in found:
        if Path(each).parent == upload_folder(base):
            Path(each).unlink(missing_ok=True)
    return [shown(each) for each in found]


def upload_folder(base: KnowledgeBase) -> Path:
    """Return the folder of the files uploaded to a knowledge base."""
    # Not under `kb`: `add` skips files there.
    return base.folder.parent.parent / UPLOADS_FOLDER / base.name


def _shown_facts(report: AddReport) -> dict[str, Any]:
    """Return a report as plain values, with the sources as clients see them."""
    found: dict[str, Any] = facts(report)
    for name in ("added", "changed", "unchanged", "removed"):
        found[name] = [shown(source) for source in found[name]]
    for each in (*found["skipped"], *found["notes"], *found["copies"]):
        each.update({key: shown(each[key]) for key in ("path", "same_as") if key in each})
    return found


def _shortened(text: str, most_bytes: int) -> str:
    return text.encode()[:most_bytes].decode("utf-8", "ignore")


@router.post("/{name}/documents", response_class=JSONResponse, openapi_extra=_BODY)
async def upload(request: Request, name: str) -> Response:
    """Index files. With `Accept: text/event-stream`, stream the progress."""
    of, parts = tenant(request), services(request)
    await run_in_threadpool(of.bases.get, name)  # an unknown name is refused before the files are read
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
                emit(index(base, files, emit))
        finally:
            for each in files:
                each.file.close()

    running = parts.uploads.start(work)
    if "text/event-stream" in request.headers.get("accept", ""):
        return await stream(request, running, UploadStream(), parts.config.server.ping_s)
    events = await collect(request, running)
    return JSONResponse(events[-1])


def _files(form: FormData) -> list[UploadFile]:
    found = []
    for field, value in form.multi_items():
        if field != "files" or not isinstance(value, UploadFile):
            raise ApiError(
                400,
                f"the form has the field {field!r}; files go into `files`",
                code="unknown_parameter",
                param=field,
            )
        clean_name(value.filename or "")
        found.append(value)
    if not found:
        raise ApiError(
            400,
            "the form has no file; send at least one in the field `files`",
            code="missing_required_parameter",
            param="files",
        )
    return found


class UploadStream(Encoder):
    """Encodes an upload as the events `progress`, `done` and `error`."""

    def event(self, event: Any) -> Iterator[bytes]:
        if isinstance(event, dict):
            yield sse({"report": event}, "done")
        else:
            stage, done, total = event
            yield sse({"stage": stage, "done": done, "total": total}, "progress")
