"""The middleware that every request passes through before it reaches a route, in this order.

It gives the request an id and a line in the log, checks its key, origin and host, refuses most requests until the model is loaded,
and limits the body. All scopes are HTTP requests: `Running` has neither websockets nor a lifespan.
"""

import asyncio
import logging
import re
import secrets
import time
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.config import LOOPBACK, ServerConfig, split
from kvweave.errors import Unauthorized
from kvweave.server.errors import RETRY_S, ApiError, api_error
from kvweave.server.json_logs import REQUEST_ID
from kvweave.server.services import Services
from kvweave.server.serving.serving import Tenant

# A request's id, and its line in the log

_LOG = logging.getLogger("kvweave.server.requests")
_USABLE: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
ID_HEADER: Final = "X-Request-Id"


class RequestLog:
    """ASGI middleware: gives a request its id, logs and counts it, and answers errors that no handler has answered."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if _USABLE.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        REQUEST_ID.set(request_id)
        began_s, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            if status:
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._log(scope, status, time.perf_counter() - began_s)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._services.metrics.http.labels(route=route, status=status).inc()
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "client": (scope.get("client") or ("",))[0],
        }
        _LOG.info("request", extra={"fields": fields})


# Admission: keys and tenants, the origins of web pages, the host names that browsers may use, and whether the model is loaded

STATIC: Final = "/static/"
OPEN: Final = ("/", "/health", "/favicon.ico")
"""Paths that need no key, beside the page's files. They show nothing of a knowledge base."""
OPERATOR: Final = ("/metrics", "/v1/settings")
"""Paths that show data of all tenants."""
WITHOUT_MODEL: Final = (*OPEN, *OPERATOR, "/openapi.json")
"""Paths that need no model, beside the page's files."""


class Admission:
    """ASGI middleware: finds the tenant of a request, or refuses it, before its body is read.

    Before the model is loaded, and while the server shuts down, it answers 503 to requests that need the model.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services
        self._origins = split(services.config.server.cors_origins)
        self._names = {*LOOPBACK, services.config.server.host, "[::1]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its tenant in the state, or refuse it."""
        path, headers = scope["path"], Headers(scope=scope)
        try:
            self._check_page(scope["method"], headers)
            if not (path in OPEN or path.startswith(STATIC)):
                scope["state"]["tenant"] = self._tenant(path, _key(headers))
            if not (path in WITHOUT_MODEL or path.startswith(STATIC)):
                self._check_ready()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _tenant(self, path: str, key: str | None) -> Tenant:
        try:
            found = self._services.serving.tenant(key)
        except Unauthorized:
            text = "Incorrect API key provided"
            if not key:  # which the message never names
                text = "You didn't provide an API key: send Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, text, code="invalid_api_key", headers=headers) from None
        if path in OPERATOR and self._services.keyed and found.name is not None:
            raise ApiError(
                403, f"{path} shows data of all tenants; send a key of --api-key", code="forbidden"
            )
        return found

    def _check_ready(self) -> None:
        if self._services.draining or not self._services.serving.ready:
            reason = "the server is ending" if self._services.draining else "the model is being loaded"
            raise ApiError(503, reason, code="not_ready", headers={"Retry-After": str(RETRY_S)})

    def _check_page(self, method: str, headers: Headers) -> None:
        """Refuse requests that a web page of another origin sends through a user's browser."""
        host = headers.get("host", "")
        if not self._services.keyed and _name(host) not in self._names:
            # With DNS rebinding, a page's own name points at this machine, and the browser sends that name as the host.
            raise ApiError(403, f"this server has no key and is not called {host!r}", code="forbidden")
        origin = headers.get("origin")
        if (
            origin is None
            or method in ("GET", "HEAD", "OPTIONS")
            or {"*", origin}.intersection(self._origins)
        ):
            return
        if origin.partition("://")[2] != host:
            raise ApiError(
                403,
                f"pages of {origin} may not use this server; allow them with --cors-origins",
                code="forbidden",
            )


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _name(host: str) -> str:
    return host if host.endswith("]") else host.rpartition(":")[0] or host


# Limits of a request's body: its size and its speed

SLOWEST_BYTES_PER_S: Final = 1000.0
_UPLOAD: Final = re.compile(r"/v1/kb/.*/documents")
LINGER_S: Final = 2.0
"""Seconds for which the server still reads a body that it refuses: many clients read the reply only after writing the body."""


class BodyLimits:
    """ASGI middleware: refuses a body that is too large (413) or arrives too slowly (408), while it is read.

    An upload has a larger limit than other requests.
    """

    def __init__(self, app: ASGIApp, server: ServerConfig) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a body that enforces the limits."""
        upload = scope["method"] == "POST" and _UPLOAD.fullmatch(scope["path"])
        most = self._server.max_upload_bytes if upload else self._server.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > most:
            await _discard(receive)
            await _too_large(most).response()(scope, receive, send)
            return
        await self._app(scope, _Watched(receive, most, self._server.client_timeout_s), send)


class _Watched:
    """Receives a body, and raises ApiError when it exceeds its limits."""

    def __init__(self, receive: Receive, most_bytes: int, timeout_s: float) -> None:
        self._receive, self._most_bytes, self._timeout_s = receive, most_bytes, timeout_s
        self._bytes, self._more, self._began_s = 0, True, time.monotonic()

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()
        until_s = self._began_s + self._timeout_s + self._bytes / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(min(self._timeout_s, max(0.0, until_s - time.monotonic()))):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, "the request's body arrived too slowly", code="timeout", headers={"Connection": "close"}
            ) from None
        self._bytes += len(message.get("body", b""))
        self._more = bool(message.get("more_body", False))
        if self._bytes > self._most_bytes:
            await _discard(self._receive)
            raise _too_large(self._most_bytes)
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body is larger than {most:,} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


async def _discard(receive: Receive) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
