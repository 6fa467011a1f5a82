"""Who may use the server: keys and tenants, the origins of web pages, the names a browser may call the server by."""

from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import Unauthorized
from kvweave.server.errors import ApiError
from kvweave.server.process.binding import LOOPBACK, split
from kvweave.server.services import Services

OPEN: Final = ("/", "/health", "/favicon.ico")
"""Paths that need no key, beside the page's files: nothing of a knowledge base is in them."""
STATIC: Final = "/static/"
OPERATOR: Final = ("/metrics", "/v1/settings")
"""Paths that show what concerns all tenants."""


class Access:
    """ASGI middleware: finds whose a request is, before its body is read."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services
        self._origins = split(services.config.server.cors_origins)
        self._names = {*LOOPBACK, services.config.server.host, "[::1]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its tenant in the state, or refuse it."""
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        self._check_page(scope["method"], headers)
        path = scope["path"]
        if path in OPEN or path.startswith(STATIC):
            return
        key = _key(headers)
        try:
            scope["state"]["tenant"] = found = self._services.serving.tenant(key)
        except Unauthorized:
            raise unauthorized(key) from None
        if path in OPERATOR and self._services.keyed and found.name is not None:
            raise ApiError(403, f"{path} is about all tenants; it needs a key of --api-key", code="forbidden")

    def _check_page(self, method: str, headers: Headers) -> None:
        """Refuse what a web page of another origin sends through a user's browser."""
        host = headers.get("host", "")
        if not self._services.keyed and _name(host) not in self._names:
            # A page whose name was pointed at this machine (DNS rebinding) sends its own name here.
            raise ApiError(403, f"this server has no key and is not called {host!r}", code="forbidden")
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD", "OPTIONS") or allowed(origin, self._origins):
            return
        if origin.partition("://")[2] != host:
            raise ApiError(
                403,
                f"pages of {origin} may not use this server; allow them with --cors-origins",
                code="forbidden",
            )


def allowed(origin: str, origins: Iterable[str]) -> bool:
    """Whether the settings name an origin."""
    return any(each in ("*", origin) for each in origins)


def unauthorized(key: str | None) -> ApiError:
    """Return the error for a missing or wrong key, which it does not show."""
    text = (
        "Incorrect API key provided"
        if key
        else "You didn't provide an API key: send Authorization: Bearer KEY"
    )
    return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _name(host: str) -> str:
    """The host without its port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host
