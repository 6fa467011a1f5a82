"""Starts the server of a home: only one at a time, known to others by the file `server.json`."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvweave.config import Config
from kvweave.errors import InvalidRequest
from kvweave.machine import return_freed_memory
from kvweave.server.process.binding import check_binding, tenants_of
from kvweave.server.process.discovery import record, sole_server
from kvweave.server.process.json_logs import log_json
from kvweave.server.process.lifecycle import Running


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
