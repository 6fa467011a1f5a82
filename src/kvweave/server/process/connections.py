"""Limits on the number of connections and on the time that each waits for its client."""

import asyncio
import logging
import resource
from itertools import chain
from typing import Any, ClassVar, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_LOG = logging.getLogger(__name__)
_OTHER_FILES: Final = 256
"""Open files that a server needs beside its connections."""


def connections_possible(wanted: int) -> int:
    """Raise the limit of open files for `wanted` connections; return the number of connections that it allows."""
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
    """A connection with deadlines for its client.

    Attributes:
        most: most connections of a server. `limited` sets this and the other attributes.
        timeout_s: seconds that a client may take to send a request's head, or to read sent data.
        unused: connections without an answer yet, oldest first.
        used: the other connections, by the time of their last answer.
    """

    most: ClassVar[int]
    timeout_s: ClassVar[float]
    unused: ClassVar[dict["LimitedProtocol", None]]
    used: ClassVar[dict["LimitedProtocol", None]]

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether the connection has a request whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection. Above the limit, end an idle one: first those that never sent a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            # Both dictionaries are in order, so a flood of connections costs no search.
            idle = (each for each in chain(self.unused, self.used) if not each.answering)
            next(idle, self).abort()
        if not self.transport.is_closing():
            self.unused[self] = None
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data. A request's line and headers must be complete in time."""
        super().data_received(data)
        if not self.answering:
            self._await_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        self._forget()
        if not self.transport.is_closing():
            self.used[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """End the connection at once and drop unsent data."""
        self.connections.discard(self)
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self.unused.pop(self, None)
        self.used.pop(self, None)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_s, self.abort)


def limited(most: int, timeout_s: float) -> type[LimitedProtocol]:
    """Return the protocol class with these limits."""
    values = {"most": most, "timeout_s": timeout_s, "unused": {}, "used": {}}
    return type("Limited", (LimitedProtocol,), values)
