"""Errors in the shape of OpenAI's API, and the HTTP status of each kvweave error."""

import errno
import logging
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kvweave import errors

_LOG = logging.getLogger(__name__)

_STATUS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.UnknownRecipe, 400, "unknown_recipe"),
    (errors.InvalidRequest, 400, "invalid_value"),
    (errors.PathNotFound, 404, "document_not_found"),
    (errors.KnowledgeBaseNotFound, 404, "knowledge_base_not_found"),
    (errors.Unauthorized, 401, "invalid_api_key"),
    (errors.Cancelled, 503, "cancelled"),
    (errors.DocumentError, 400, "unreadable_document"),
    (errors.EmptyKnowledgeBase, 409, "empty_knowledge_base"),
    (errors.KnowledgeBaseError, 409, "knowledge_base_conflict"),
    (errors.UnsupportedModel, 400, "unsupported_by_model"),
    (errors.StoreBusy, 503, "store_busy"),
    (errors.StoreFull, 507, "disk_full"),
    (errors.EngineUnavailable, 503, "engine_unavailable"),
    (errors.EngineError, 502, "engine_error"),
    (errors.MissingExtra, 501, "missing_extra"),
    (errors.KvweaveError, 500, "server_error"),
)
"""Status and code of each class of errors. The first class that matches an error applies."""

BRANCHES: Final = ("<text>", "<list>")
"""Names that pydantic gives the two forms of a field that takes text or a list. Error messages leave them out."""

RETRY_S: Final = 5
"""Seconds in `Retry-After` if the server has no estimate of the wait."""


class ApiError(HTTPException):
    """An error reply. `param` names the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.code, self.param = message, code, param

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": _type(self.status_code), "param": self.param}
        return {"error": {**error, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


class ErrorFields(BaseModel):
    """A message for people, the kind of error, the request field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorFields


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The server refuses the request."},
    "5XX": {
        "model": ErrorBody,
        "description": "The server cannot answer the request, or cannot answer it now.",
    },
}
"""The error replies of all routes, for `/openapi.json`."""


def api_error(error: BaseException) -> ApiError:
    """Return the error reply for any exception.

    An unexpected exception is logged, and the client does not see its text.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "no space is left on the server's disk", code="disk_full")
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_S)} if status == 503 else None
            return ApiError(
                status, str(error), code=code, param=getattr(error, "field", None), headers=headers
            )
    _LOG.error("a request failed", exc_info=error)
    return ApiError(
        500, "the server failed; its log has the reason under this request's id", code="server_error"
    )


def install(app: FastAPI) -> None:
    """Make the application answer errors in the API's shape."""
    for kind in (HTTPException, RequestValidationError, errors.KvweaveError, OSError):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return api_error(error).response()


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the error reply that names the first invalid field of a request."""
    found = error.errors()[0]
    unseen = ("body", "query", "path", "header", *BRANCHES)
    place = [str(part) for part in found["loc"] if part not in unseen]
    param, kind = ".".join(place) or None, found["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {found['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(
            400, f"Unrecognized request argument supplied: {param}", code="unknown_parameter", param=param
        )
    if kind == "missing":
        return ApiError(
            400, f"Missing required parameter: {param}", code="missing_required_parameter", param=param
        )
    code = "unsupported_parameter" if kind == "unsupported" else "invalid_value"
    wrong = _MESSAGES[kind].format_map(found["ctx"]) if kind in _MESSAGES else found["msg"]
    text = wrong if param is None else f"{param}: {wrong}"
    return ApiError(400, text, code=code, param=param)


_MESSAGES: Final = {
    "too_long": "at most {max_length} are possible, not {actual_length}",
    "too_short": "at least {min_length} is needed",
}
"""Messages that replace pydantic's own."""


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"
