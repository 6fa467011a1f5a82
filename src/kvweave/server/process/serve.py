"""Starts the server of a home: only one at a time, known to others by the file `server.json`."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvweave.config import Config
from kvweave.engine.serving.tenants import Tenants, read_tenants
from kvweave.errors import InvalidRequest
from kvweave.machine import return_freed_memory
from kvweave.server.process.discovery import record, sole_server
from kvweave.server.process.lifecycle import Running
from kvweave.server.process.request_log import log_json
from kvweave.server_config import ServerConfig

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def split(text: str | None) -> tuple[str, ...]:
    """Return what a setting lists, separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def tenants_of(server: ServerConfig) -> Tenants | None:
    """Return who may use the server, as its settings say; None for whoever asks. Raises InvalidRequest."""
    keys = split(server.api_key)
    if server.tenants is not None:
        return read_tenants(Path(server.tenants).expanduser(), keys)
    return Tenants(dict.fromkeys(keys)) if keys else None


def check_binding(server: ServerConfig) -> None:
    """Raise InvalidRequest if other machines could use the server without a key."""
    if server.host not in LOOPBACK and not split(server.api_key) and server.tenants is None:
        raise InvalidRequest(
            f"host is {server.host!r}, which other machines can reach: give --api-key or --tenants, or listen on 127.0.0.1"
        )


def serve(config: Config, announce: Callable[[str], object] = print) -> None:
    """Serve until SIGTERM or Ctrl-C; `announce` is called with one line when the port is open.

    Raises InvalidRequest if another server uses the home, if the port is taken, or if other machines could use the
    server without a key.
    """
    check_binding(config.server)
    return_freed_memory()
    tenants = tenants_of(config.server)
    with sole_server(config.home), _bound(config.server.host, config.server.port) as listening:
        url = _url(listening)
        log_json()
        record(config.home, url)
        announce(f"kvweave listens on {url}")
        Running(config, tenants).run(listening)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Open the port; raises InvalidRequest if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError as error:
            raise InvalidRequest(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        yield listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
