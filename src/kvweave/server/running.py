"""A bounded queue of requests. Each runs in a thread of its own and hands its events to the event loop."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, TypeVar

from kvweave.cancellation import cancellable
from kvweave.machine import free_buffers, use_one_thread
from kvweave.server.errors import RETRY_S, ApiError

Argument = TypeVar("Argument")
Emit = Callable[[Any], None]
Work = Callable[[Emit, threading.Event], None]
"""Computes a request: it calls its first argument with each event, and ends soon after its second argument is set."""

_MEMORY: Final = 0.8
"""Weight of the earlier requests in the moving average of a request's duration."""


class RunningRequest:
    """A request that runs in a thread. `next` returns its events; `cancel` asks the thread to end."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._events: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self._ended = False
        self._loop = asyncio.get_running_loop()

    async def next(self, timeout_s: float | None = None) -> Any:
        """Return the next event.

        Raises StopAsyncIteration after the last event, TimeoutError if no event comes in time, and any error of the thread.
        """
        if self._ended:
            raise StopAsyncIteration
        async with asyncio.timeout(timeout_s):
            event, error, self._ended = await self._events.get()
        if error is not None:
            raise error
        if self._ended:
            raise StopAsyncIteration
        return event

    def cancel(self) -> None:
        """Ask the thread to end. When it has, the next request can run."""
        self.cancelled.set()

    def run(self, work: Work) -> None:
        """Compute the request in this thread. `check_cancelled` in it raises after `cancel`."""
        try:
            with cancellable(self.cancelled.is_set):
                work(self._hand_over, self.cancelled)
        except BaseException as error:
            self._hand_over(None, error)
        else:
            self._hand_over(None, ended=True)

    def _hand_over(self, event: Any, error: BaseException | None = None, ended: bool = False) -> None:
        with suppress(RuntimeError):  # the loop has closed, so nobody waits for the event
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, error, ended))


class RequestQueue:
    """Runs at most `most_running` requests at once, in order of arrival; at most `most_waiting` wait."""

    def __init__(self, name: str, most_running: int, most_waiting: int) -> None:
        self.running, self.waiting = 0, 0
        self._most_running, self._most_waiting = most_running, most_waiting
        self._places = asyncio.Semaphore(most_running)
        self._threads = ThreadPoolExecutor(most_running, name, use_one_thread)
        self._requests: set[RunningRequest] = set()
        self._typical_s = 1.0

    async def start(self, work: Work) -> RunningRequest:
        """Wait until a thread is free, then run `work` in it. Raises ApiError (429) if too many requests wait."""
        if self._places.locked() and self.waiting >= self._most_waiting:
            raise self._refusal()
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        request = RunningRequest()
        self.running += 1
        self._requests.add(request)
        done = asyncio.get_running_loop().run_in_executor(self._threads, and_free, request.run, work)
        began = perf_counter()
        done.add_done_callback(lambda _: self._end(request, perf_counter() - began))
        return request

    def cancel_all(self) -> None:
        """Ask all running requests to end."""
        for request in self._requests:
            request.cancel()

    def close(self) -> None:
        """Cancel all requests and wait for their threads."""
        self.cancel_all()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _end(self, request: RunningRequest, seconds: float) -> None:
        self.running -= 1
        self._requests.discard(request)
        self._typical_s = _MEMORY * self._typical_s + (1 - _MEMORY) * seconds
        self._places.release()

    def _refusal(self) -> ApiError:
        ahead = self.waiting + self.running
        wait_s = max(1, min(60 * RETRY_S, math.ceil(self._typical_s * ahead / self._most_running)))
        return ApiError(
            429,
            f"{self.running} requests run and {self.waiting} wait, and this server takes no more; try again in {wait_s} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait_s)},
        )


def together(
    call: Callable[[int], None], numbers: Sequence[int], most: int, cancelled: threading.Event
) -> None:
    """Call `call` with each number in threads, at most `most` at once; return when all calls have ended.

    At the first error, set `cancelled`, so that the other calls end soon, and raise that error.
    """
    if len(numbers) < 2:
        for number in numbers:
            call(number)
        return
    with ThreadPoolExecutor(min(most, len(numbers)), "answer", use_one_thread) as threads:
        calls = [threads.submit(and_free, call, number) for number in numbers]
        done, left = wait(calls, return_when=FIRST_EXCEPTION)
        errors = [error for each in calls if each in done and (error := each.exception()) is not None]
        if errors:
            cancelled.set()
            for each in left:
                each.cancel()
            raise errors[0]


def and_free(call: Callable[[Argument], None], argument: Argument) -> None:
    """Call `call` in a thread of a pool, then free the buffers that the thread would keep."""
    try:
        call(argument)
    finally:
        free_buffers()
