"""Limits of connections: how many there are, and how long one may wait for its client."""

import asyncio
import logging
import resource
from time import monotonic
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_LOG = logging.getLogger(__name__)
_OTHER_FILES: Final = 256
"""Open files that a server needs beside its connections."""


def connections_possible(wanted: int) -> int:
    """Allow this process as many open files as `wanted` connections need; return how many there can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(1, soft - _OTHER_FILES)
    _LOG.warning("max_connections is %d, but %d open files allow %d", wanted, soft, possible)
    return possible


class LimitedProtocol(H11Protocol):
    """A connection with deadlines for its client. `most` and `timeout_s` are set by `limited`."""

    most = 1000
    timeout_s = 20.0

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.idle_since_s = monotonic()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a request came in whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; above the limit, end one that is idle, first of all one that has never asked anything."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            others = [
                each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self
            ]
            idle = [each for each in others if not each.answering]
            min(idle, key=lambda each: (each.cycle is not None, each.idle_since_s), default=self).abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; a request's line and headers must be there in time."""
        super().data_received(data)
        if not self.answering:
            self._await_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.idle_since_s = monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Give the client some time to read what was sent."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_s, self.abort)

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_s, self.abort)


def limited(most: int, timeout_s: float) -> type[LimitedProtocol]:
    """Return the protocol with these limits."""
    return type("Limited", (LimitedProtocol,), {"most": most, "timeout_s": timeout_s})
