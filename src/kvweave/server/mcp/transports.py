"""Transports of the MCP server: standard input and output, or streamable HTTP with an API key."""

import contextlib
import ipaddress
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import InvalidRequest, Unauthorized
from kvweave.server.process.lifecycle import bound, url_of
from kvweave.server.serving.tenants import Tenants

PATH: Final = "/mcp"


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve until standard input ends. Meanwhile the transport points descriptor 1 at standard error.

    With the lifespan `prints_to_stderr`, standard output carries the protocol and nothing else.
    """
    server.run("stdio")


@contextlib.asynccontextmanager
async def prints_to_stderr(_: object) -> AsyncIterator[None]:
    """Lifespan that sends Python's prints to standard error. Python's buffer would otherwise be written after the transport ends."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def serve_http(
    server: MCPServer[Any], host: str, port: int, keys: Sequence[str], listening: Callable[[str], None]
) -> None:
    """Serve streamable HTTP until SIGINT or SIGTERM; call `listening` with the address when the port is open.

    Raises InvalidRequest if other machines can reach the address and there is no key, if a key is too short, or if the port is
    taken.
    """
    if not keys and not is_loopback(host):
        raise InvalidRequest(
            f"{host} can be reached from other machines: set KVWEAVE_API_KEY, or listen on 127.0.0.1"
        )
    app = server.streamable_http_app(streamable_http_path=PATH, host=host)
    with bound(host, port) as listener:
        listening(url_of(listener) + PATH)
        config = uvicorn.Config(
            KeyRequired(app, keys) if keys else app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
        )
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class KeyRequired:
    """ASGI middleware: answers 401 to HTTP requests without one of the keys in `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, Tenants(dict.fromkeys(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(Headers(scope=scope).get("authorization", "")):
            refusal = JSONResponse(
                {"error": "no valid API key: send it as `Authorization: Bearer KEY`"},
                401,
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        try:
            self._keys.name_of(key.strip())
        except Unauthorized:
            return False
        return scheme.lower() == "bearer"
