"""Limits of a request's body: its size, and how slowly it may come."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.server.errors import ApiError
from kvweave.server_config import ServerConfig

SLOWEST_BYTES_PER_S: Final = 1000.0
LINGER_S: Final = 2.0
"""How long a body that is refused is still read: a client that writes it does not read the answer before."""


class BodyLimits:
    """ASGI middleware: ends a request whose body is too large (413) or comes too slowly (408), while it is read.

    Args:
        is_upload: tells from method and path whether the larger limit holds.
    """

    def __init__(self, app: ASGIApp, server: ServerConfig, is_upload: Callable[[str, str], bool]) -> None:
        self._app, self._server, self._is_upload = app, server, is_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a body that is watched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = self._is_upload(scope["method"], scope["path"])
        most = self._server.max_upload_bytes if upload else self._server.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > most:
            await _discard(receive)
            await _too_large(most).response()(scope, receive, send)
            return
        await self._app(scope, _Watched(receive, most, self._server.client_timeout_s), send)


class _Watched:
    """Receives a body within its limits."""

    def __init__(self, receive: Receive, most_bytes: int, timeout_s: float) -> None:
        self._receive, self._most_bytes, self._timeout_s = receive, most_bytes, timeout_s
        self._bytes, self._more, self._began_s = 0, True, monotonic()

    async def __call__(self) -> Message:
        """Return the next message; raises ApiError."""
        if not self._more:
            return await self._receive()
        until_s = self._began_s + self._timeout_s + self._bytes / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(min(self._timeout_s, max(0.0, until_s - monotonic()))):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, "the request's body came too slowly", code="timeout", headers={"Connection": "close"}
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
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
