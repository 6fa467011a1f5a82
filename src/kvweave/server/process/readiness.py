"""Refuses requests while the server cannot answer them: before the model is loaded, and once the server is ending."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.server.errors import RETRY_S, ApiError
from kvweave.server.services import Services

ALWAYS: Final = ("/", "/health", "/metrics", "/v1/settings", "/favicon.ico", "/openapi.json")
"""Paths that need no model, beside the page's files."""


class Readiness:
    """ASGI middleware: answers 503 while the server is not ready."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        reason = None if scope["type"] != "http" or _is_open(scope["path"]) else self._reason()
        if reason is None:
            await self._app(scope, receive, send)
            return
        error = ApiError(503, reason, code="not_ready", headers={"Retry-After": str(RETRY_S)})
        await error.response()(scope, receive, send)

    def _reason(self) -> str | None:
        if self._services.draining:
            return "the server is ending"
        return None if self._services.serving.ready else "the model is being loaded"


def _is_open(path: str) -> bool:
    return path in ALWAYS or path.startswith("/static/")
