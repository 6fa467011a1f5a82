"""Server-sent events: streams a running request, and sends comments while it is silent."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from time import monotonic
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvweave.server.errors import api_error
from kvweave.server.running import RunningRequest

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
_ESCAPES: Final = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
"""Unicode's other line ends, at which many clients cut a stream into lines, as Python's `splitlines` does."""

_T = TypeVar("_T")


class Encoder(ABC):
    """Turns the events of a request into the bytes of a stream. An error becomes the event `error`."""

    @abstractmethod
    def event(self, event: Any) -> Iterator[bytes]:
        """Yield the bytes of one event."""

    def end(self) -> Iterator[bytes]:
        """Yield the bytes after the last event."""
        yield from ()

    def failed(self, error: BaseException) -> Iterator[bytes]:
        """Yield the bytes that end a stream after an error."""
        yield error_event(error, "error")


def sse(data: Any, event: str | None = None) -> bytes:
    """Return the bytes of one event, with `data` as JSON."""
    name = f"event: {event}\n" if event else ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{name}data: {text.translate(_ESCAPES)}\n\n".encode()


def error_event(error: BaseException, event: str | None = None) -> bytes:
    """Return the event that ends a stream after an error, with the body of the error reply."""
    return sse(api_error(error).body(), event)


async def unless_disconnected(receive: Receive, waited_for: Coroutine[Any, Any, _T]) -> _T:
    """Await a coroutine. Cancel it and raise ClientDisconnect if the client leaves.

    The caller must have read the request's body.
    """
    task, left = asyncio.ensure_future(waited_for), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.wait({task, left})


async def collect(request: Request, running: Coroutine[Any, Any, RunningRequest]) -> list[Any]:
    """Start a request, wait for its end and return all its events. Cancel it if the client leaves."""

    async def events() -> list[Any]:
        found, work = [], await running
        try:
            while True:
                found.append(await work.next())
        except StopAsyncIteration:
            return found
        finally:
            work.cancel()

    return await unless_disconnected(request.receive, events())


class EventStream(StreamingResponse):
    """Streams a running request; cancels it when the client leaves.

    Args:
        running: the request.
        first: events that the caller has already taken from it.
        encoder: turns the events into bytes.
        ping_s: seconds of silence before the stream sends a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        running: RunningRequest,
        first: list[Any],
        encoder: Encoder,
        ping_s: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            _encoded(running, first, encoder, ping_s),
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Unlike the library, notice a client that leaves before anything is sent to it.
            await unless_disconnected(receive, self.stream_response(send))
        finally:
            self._running.cancel()


async def _encoded(
    running: RunningRequest, first: list[Any], encoder: Encoder, ping_s: float
) -> AsyncIterator[bytes]:
    try:
        for event in first:
            yield b"".join(encoder.event(event))
        while True:
            await asyncio.sleep(0)  # let other requests run, even if this one has events waiting
            try:
                yield b"".join(encoder.event(await running.next(ping_s)))
            except TimeoutError:
                yield PING
            except StopAsyncIteration:
                break
        yield b"".join(encoder.end())
    except Exception as error:
        yield b"".join(encoder.failed(error))


async def stream(
    request: Request,
    starting: Coroutine[Any, Any, RunningRequest],
    encoder: Encoder,
    ping_s: float,
    until: Callable[[list[Any]], bool] = bool,
    headers: Callable[[list[Any]], Mapping[str, str]] = lambda first: {},
) -> EventStream:
    """Start a request and return its stream.

    The stream starts when the first events satisfy `until`, or after `ping_s` seconds. An error before that is raised, so the
    client gets its status. `headers` computes the response's headers from these events.
    """

    async def begun() -> tuple[RunningRequest, list[Any]]:
        running, first = await starting, list[Any]()
        until_s = monotonic() + ping_s
        try:
            while not until(first):
                first.append(await running.next(max(0.0, until_s - monotonic())))
        except (TimeoutError, StopAsyncIteration):
            pass
        except BaseException:
            running.cancel()
            raise
        return running, first

    running, first = await unless_disconnected(request.receive, begun())
    return EventStream(running, first, encoder, ping_s, headers(first))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
