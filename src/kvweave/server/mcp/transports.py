"""How the MCP server is reached: standard input and output, or streamable HTTP with an API key."""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import InvalidRequest, Unauthorized
from kvweave.server.serving.tenants import Tenants

PATH: Final = "/mcp"


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve until standard input ends. The transport points descriptor 1 at standard error meanwhile.

    So nothing but the protocol reaches standard output, if the server was made with `prints_to_stderr`.
    """
    server.run("stdio")


@contextlib.asynccontextmanager
async def prints_to_stderr(_: object) -> AsyncIterator[None]:
    """Send what Python prints to standard error, as a lifespan: in a buffer it would outlast the transport."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def serve_http(
    server: MCPServer[Any], host: str, port: int, keys: Sequence[str], listening: Callable[[str], None]
) -> None:
    """Serve streamable HTTP until SIGINT or SIGTERM; `listening` gets the address once connections are accepted.

    Raises:
        InvalidRequest: an address that is not of this machine alone, without a key; a key that is too short; or the port is
            taken.
    """
    if not keys and not is_loopback(host):
        raise InvalidRequest(
            f"{host} can be reached from other machines: set KVWEAVE_API_KEY, or listen on 127.0.0.1"
        )
    app = server.streamable_http_app(streamable_http_path=PATH, host=host)
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        listening(f"http://{shown}:{listener.getsockname()[1]}{PATH}")
        config = uvicorn.Config(
            KeyRequired(app, keys) if keys else app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
        )
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return whether an address or name is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class KeyRequired:
    """Answers 401 to HTTP requests that do not carry one of the keys as `Authorization: Bearer KEY`."""

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


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {error}; name another --port") from error
