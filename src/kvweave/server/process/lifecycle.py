"""Runs the server in its process: opens the port, loads the model, answers, and shuts down without losing a request."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope

from kvweave.config import Config, ServerConfig, split
from kvweave.errors import InvalidRequest
from kvweave.machine import return_freed_memory
from kvweave.server.json_logs import log_json
from kvweave.server.process.connections import connections_possible, limited
from kvweave.server.process.discovery import record, sole_server
from kvweave.server.serving.tenants import Tenants, tenants_of

if TYPE_CHECKING:
    from kvweave.server.services import Services


_LOG = logging.getLogger(__name__)
KEEP_ALIVE_S: Final = 75
RETRY_AFTER_S: Final = 5
CANCELLED_S: Final = 60
"""Seconds for which cancelled requests may still reply. The process waits for their threads in any case."""
READY, STOPPING = "READY=1", "STOPPING=1"
"""States of systemd's protocol, sd_notify(3)."""


def serve(config: Config, announce: Callable[[str], object] = print) -> None:
    """Serve until SIGTERM or Ctrl-C; call `announce` with one line when the port is open.

    Raises InvalidRequest if another server uses the home, if the port is taken, or if other machines could use the
    server without a key.
    """
    check_binding(config.server)
    return_freed_memory()
    tenants = tenants_of(config.server)
    with sole_server(config.home), bound(config.server.host, config.server.port) as listening:
        url = url_of(listening)
        log_json()
        record(config.home, url)
        announce(f"kvweave listens on {url}")
        Running(config, tenants).run_on(listening)


def check_binding(server: ServerConfig) -> None:
    """Raise InvalidRequest if other machines could use the server without a key."""
    if not is_loopback(server.host) and not split(server.api_key) and server.tenants is None:
        raise InvalidRequest(
            f"other machines can reach the host {server.host!r}: give --api-key or --tenants, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on a port, 0 for a free one. Raises InvalidRequest if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except (OSError, OverflowError) as error:
            raise InvalidRequest(f"cannot listen on {host}:{port}: {error}; name another --port") from error
        yield listening


def url_of(listening: socket.socket) -> str:
    """Return the address of a server that listens there."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Running(uvicorn.Server):
    """A server in this process. `services` is None until the application is created.

    It ends on the first signal after its requests finish or `grace_s` passes, and on the second at once.
    """

    def __init__(self, settings: Config, tenants: Tenants | None) -> None:
        server = settings.server
        super().__init__(
            uvicorn.Config(
                self._respond,
                interface="asgi3",  # of a method uvicorn cannot tell it
                http=limited(connections_possible(server.max_connections), server.client_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CANCELLED_S,
            )
        )
        self._settings, self._tenants = settings, tenants
        self._app: ASGI3Application | None = None
        self._signals, self._until_s = 0, 0.0
        self.services: Services | None = None
        self.failure: Exception | None = None

    def run_on(self, listening: socket.socket) -> None:
        """Serve until a signal or a call of `end`. Raises the error if the model could not be loaded."""
        threading.Thread(target=self._load, name="load", daemon=True).start()
        asyncio.run(self.serve(sockets=[listening]))
        if self.services is not None:
            self.services.close()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Shut down as on a signal: the first call lets requests finish, the second cancels them."""
        self.handle_exit(signal.SIGTERM, None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal, refuse new requests; on the second, cancel the running ones."""
        self._signals += 1
        tell_systemd(STOPPING)
        if self._signals == 1 and self.services is not None:
            self.services.draining = True
            self._until_s = time.monotonic() + self._settings.server.grace_s

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end now. uvicorn calls this ten times a second."""
        await super().on_tick(counter)
        parts = self.services
        if not self._signals or parts is None:
            return bool(self._signals)
        if parts.busy and self._signals == 1 and time.monotonic() < self._until_s:
            return False
        parts.cancel_all()
        return True

    async def _respond(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Pass a request to the application; answer 503 until there is one.

        The port opens at once, but the application's imports and its model take seconds. So no import of this module may load
        the code that runs models.
        """
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _loading(scope["path"])(scope, receive, send)

    def _load(self) -> None:
        began_s = time.perf_counter()
        try:
            from kvweave.server.app import create_app
            from kvweave.server.services import Services
            from kvweave.server.serving.serving import Serving

            server = self._settings.server
            serving = Serving(
                self._settings,
                self._tenants,
                idle=server.idle_work,
                share_kv=server.share_kv,
                async_kv=server.async_kv,
            )
            self.services = Services(self._settings, serving, keyed=self._tenants is not None)
            self._app = create_app(self.services)  # type: ignore[assignment]
            serving.load()
            tell_systemd(READY)
        except Exception as error:
            self.failure = error
            self.end()
            return
        _LOG.info("ready", extra={"fields": {"seconds": round(time.perf_counter() - began_s, 3)}})


def _loading(path: str) -> ASGI3Application:
    from starlette.responses import JSONResponse  # where it is needed: the port opens sooner

    error = {
        "message": "the model is being loaded",
        "type": "server_error",
        "param": None,
        "code": "not_ready",
    }
    body: dict[str, Any] = {"status": "loading"} if path == "/health" else {"error": error}
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    return JSONResponse(body, 503, headers)  # type: ignore[return-value]


def tell_systemd(state: str) -> None:
    """Send the state to systemd, if NOTIFY_SOCKET names a socket. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
