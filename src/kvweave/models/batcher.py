"""Continuous batching: the passes of concurrent requests run together, packed into one call of the model.

A request is written as if it were alone, in a thread of its own. Where it calls the model, it waits here. One thread collects waiting
requests and runs them together: one or a few rows per decoding request, and pieces of prompts up to half a second of work (one second
if no request is decoding). A long prompt delays a token by at most one such pass. A request whose KV is still loading delays no other
(FusionRAG §4.2, §4.3). `pass_schedule` says what runs when, and how long a request may wait.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvweave.cancellation import current_wish
from kvweave.errors import Cancelled
from kvweave.models.pass_schedule import PASS_S, Batch, PassRows, PassSchedule, WaitingPass

LINGER_SHARE: Final = 0.25
"""For at most this share of the last pass' time, the next one waits for the requests that have just been served."""


@dataclass(slots=True)
class BatchStats:
    """What the batcher has done: calls of the model, rows and requests in them, the most requests in one call."""

    passes: int = 0
    rows: int = 0
    requests: int = 0
    most_requests: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class PassBatcher:
    """Runs passes of one model, in a thread of its own, until `close`. Safe to use from several threads.

    Args:
        run_packed: runs the rows of several requests in one call, at most one at a time; see `packed.run_packed`.
        pass_s: seconds that a pass with pieces of prompts should take.
        load_ahead: load and place stored KV in the threads of the requests, while others compute; otherwise in the passes.
    """

    def __init__(
        self,
        run_packed: Callable[[Sequence[PassRows]], list[Tensor | Exception]],
        pass_s: float = PASS_S,
        *,
        load_ahead: bool = True,
    ) -> None:
        self.stats = BatchStats()
        self.load_ahead = load_ahead
        self._run_packed = run_packed
        self._waiting: list[WaitingPass] = []  # as they came
        self._changed = threading.Condition()
        self._closed = False
        self._returning = 0  # requests that have just been served and may call again at once
        self._schedule = PassSchedule(pass_s)
        self._last_s = 0.0
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="kvweave-passes", daemon=True)
        self._thread.start()

    @property
    def prompt_rows_per_s(self) -> float | None:
        """Rows that passes over many of them compute per second, on average of the latest; None before there was one."""
        return self._schedule.pass_time.rows_per_s

    @property
    def waiting(self) -> int:
        """Requests whose pass has not begun or is not complete."""
        return len(self._waiting)

    def run(self, rows: PassRows, *, in_pieces: bool) -> Tensor:
        """Run rows together with those of other requests; return the last ones' logits (keep, vocab).

        A request that its caller gives up (`cancellation`) ends between two pieces at the latest.

        Rows `in_pieces` may run in several passes, in order. Raises Cancelled, and what a hook or the cache raises.
        """
        logits: Tensor = self._submit(WaitingPass(rows, None, in_pieces, current_wish()))
        return logits

    def run_alone(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a pass that cannot be packed; as `run`."""
        logits: Tensor = self._submit(WaitingPass(None, call, False, current_wish()))
        return logits

    def close(self) -> None:
        """End the thread; passes that still wait raise Cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _submit(self, waiting: WaitingPass) -> Any:
        with self._changed:
            if self._closed:
                raise Cancelled("the server is shutting down")
            self._waiting.append(waiting)
            self._returning = max(0, self._returning - 1)
            self._changed.notify_all()
        try:
            return waiting.result.result()
        finally:
            del waiting  # an error's frames would hold it, and it the error

    # The thread that runs passes

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (batch := self._next_batch()) is not None:
            began = time.perf_counter()
            finished = self._run(batch)
            self._last_s = time.perf_counter() - began
            self._deliver(finished)
            del batch, finished  # while it waits, this thread must not keep a finished request's KV
        with self._changed:
            left, self._waiting = self._waiting, []
        for each in left:
            each.result.set_exception(Cancelled("the server is shutting down"))

    def _deliver(self, finished: "dict[WaitingPass, Any]") -> None:
        with self._changed:
            self._waiting = [each for each in self._waiting if each not in finished]
            self._returning = len(finished)
        for each, result in finished.items():
            if isinstance(result, BaseException):
                each.result.set_exception(result)
            else:
                each.result.set_result(result)

    def _next_batch(self) -> Batch | None:
        """Wait for passes, and a moment for those that are about to come; return the pieces to run, or None at the end."""
        with self._changed:
            linger_until = time.perf_counter() + LINGER_SHARE * self._last_s
            while not self._closed and self._returning > 0:
                left = linger_until - time.perf_counter()
                if left <= 0 or not self._changed.wait(left):
                    break
            self._returning = 0
            while not self._closed and not self._waiting:
                self._changed.wait()
            if self._closed:
                return None
            return self._schedule.choose(self._waiting)

    def _run(self, batch: Batch) -> dict[WaitingPass, Any]:
        """Run one batch; return the passes that are complete, with their logits or errors."""
        if batch[0][1] is None:
            return {each: self._alone(each) for each, _ in batch}
        began = time.perf_counter()
        packed = [rows for _, rows in batch if rows is not None]
        try:
            results = self._run_packed(packed)
        except BaseException as error:  # not one request's own: all of them learn of it
            return dict.fromkeys((each for each, _ in batch), error)
        self._record(packed, time.perf_counter() - began)
        finished: dict[WaitingPass, Any] = {}
        for (each, rows), result in zip(batch, results, strict=True):
            assert rows is not None
            each.done += rows.ids.numel()
            if isinstance(result, Exception) or not each.left:
                finished[each] = result
        return finished

    def _alone(self, waiting: WaitingPass) -> Any:
        if waiting.given_up:
            return Cancelled("the request was given up before it was done")
        try:
            assert waiting.alone is not None
            return waiting.alone()
        except BaseException as error:
            return error

    def _record(self, packed: Sequence[PassRows], seconds: float) -> None:
        rows = sum(each.ids.numel() for each in packed)
        self._schedule.record(rows, seconds)
        stats = self.stats
        stats.passes += 1
        stats.rows += rows
        stats.requests += len(packed)
        stats.most_requests = max(stats.most_requests, len(packed))
        stats.seconds += seconds
        stats.longest_s = max(stats.longest_s, seconds)
