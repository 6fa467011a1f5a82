"""Continuous batching: the passes of concurrent requests run together, packed into one call of the model.

A request is written as if it were alone, in a thread of its own. Where it calls the model, it waits here. One thread takes
what waits and runs it: first the rows of all decoding requests, one or a few of each, then pieces of prompts, as many rows as
a pass of about half a second takes, or of a second where nobody is decoding. So a long prompt delays nobody's next token by more than
one such pass, and a request whose KV is still loading delays nobody (FusionRAG §4.2, §4.3; piecewise prefill as in Sarathi-Serve,
arXiv 2403.02310).
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvweave.cancellation import current_wish
from kvweave.errors import Cancelled
from kvweave.models.packed import PassRows
from kvweave.models.pass_time import PassTime

PASS_S: Final = 0.5
"""Seconds that a pass with pieces of prompts should take: so long they delay a token. Where the weights alone take longer to
read, it takes twice that time."""
WITHOUT_REPLIES: Final = 2.0
"""A pass that delays nobody's token may take so many times as long."""
LEAST_PIECE, MOST_ROWS, FIRST_ROWS = 32, 4096, 256
"""Rows: the smallest piece of a prompt, the most of a pass, and those of a pass before any has been timed."""
LINGER_SHARE: Final = 0.25
"""For at most this share of the last pass' time, the next one waits for the requests that have just been served."""


class RunPacked(Protocol):
    """Runs the rows of several requests in one call; see `run_packed`."""

    def __call__(self, packed: Sequence[PassRows]) -> list[Tensor | Exception]:
        """Return each request's logits, or the error that ended its part of the pass."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A pass that waits: rows to run in any number of pieces, or a call that needs the model for itself."""

    rows: PassRows | None
    alone: Callable[[], Any] | None
    in_pieces: bool
    cancelled: Callable[[], bool] | None
    result: "Future[Any]" = field(default_factory=Future)
    done: int = 0

    @property
    def appends(self) -> bool:
        """Whether it continues a reply."""
        return self.rows is not None and self.rows.appends

    @property
    def left(self) -> int:
        """Rows that have not run yet."""
        return 0 if self.rows is None else self.rows.ids.numel() - self.done

    def piece(self, most: int) -> PassRows:
        """Return the next rows, at most so many; logits only for the last ones."""
        assert self.rows is not None
        if not self.in_pieces or (self.done == 0 and most >= self.left):
            return self.rows
        end = min(self.done + most, self.rows.ids.numel())
        keep = self.rows.keep if end == self.rows.ids.numel() else 0
        return self.rows.some(self.rows.plan.subset(self.rows.plan.rows[self.done : end]), keep)


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
        run_packed: runs a packed pass.
        busy: the lock of the model, which passes of low priority take too.
        pass_s: seconds that a pass with pieces of prompts should take.
        load_ahead: load and place stored KV in the threads of the requests, while others compute; otherwise in the passes.
    """

    def __init__(
        self,
        run_packed: RunPacked,
        busy: threading.RLock,
        pass_s: float = PASS_S,
        *,
        load_ahead: bool = True,
    ) -> None:
        self.stats = BatchStats()
        self.load_ahead = load_ahead
        self._run_packed, self._busy = run_packed, busy
        self._waiting: list[_Waiting] = []  # as they came
        self._changed = threading.Condition()
        self._closed = False
        self._returning = 0  # requests that have just been served and may call again at once
        self._pass_s, self._was_alone = pass_s, False
        self._pass_time = PassTime()
        self._last_s = 0.0
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="kvweave-passes", daemon=True)
        self._thread.start()

    @property
    def prompt_rows_per_s(self) -> float | None:
        """Rows that passes over many of them compute per second, on average of the latest; None before there was one."""
        return self._pass_time.rows_per_s

    @property
    def waiting(self) -> int:
        """Requests whose pass has not begun or is not complete."""
        return len(self._waiting)

    def run(self, rows: PassRows, *, in_pieces: bool) -> Tensor:
        """Run rows together with those of other requests; return the last ones' logits (keep, vocab).

        A request that its caller gives up (`cancellation`) ends between two pieces at the latest.

        Rows `in_pieces` may run in several passes, in order. Raises Cancelled, and what a hook or the cache raises.
        """
        logits: Tensor = self._submit(_Waiting(rows, None, in_pieces, current_wish()))
        return logits

    def run_alone(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a pass that cannot be packed; as `run`."""
        logits: Tensor = self._submit(_Waiting(None, call, False, current_wish()))
        return logits

    def close(self) -> None:
        """End the thread; passes that still wait raise Cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _submit(self, waiting: _Waiting) -> Any:
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

    def _deliver(self, finished: "dict[_Waiting, Any]") -> None:
        with self._changed:
            self._waiting = [each for each in self._waiting if each not in finished]
            self._returning = len(finished)
        for each, result in finished.items():
            if isinstance(result, BaseException):
                each.result.set_exception(result)
            else:
                each.result.set_result(result)

    def _next_batch(self) -> list[tuple[_Waiting, PassRows | None]] | None:
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
            return self._choose(self._waiting)

    def _choose(self, waiting: Sequence[_Waiting]) -> list[tuple[_Waiting, PassRows | None]]:
        """Return what runs next: a pass alone, or rows of replies and pieces of prompts together."""
        gone = [each for each in waiting if each.cancelled is not None and each.cancelled()]
        if gone:
            return [(each, None) for each in gone]
        alone = [each for each in waiting if each.alone is not None]
        packable = [each for each in waiting if each.rows is not None]
        if alone and not (packable and self._was_alone):  # in turn, so that neither kind starves
            self._was_alone = True
            return [(alone[0], None)]
        self._was_alone = False
        replies = [each for each in packable if each.appends]
        chosen: list[tuple[_Waiting, PassRows | None]] = [(each, each.piece(each.left)) for each in replies]
        room = self._room(bool(replies)) - sum(each.left for each in replies)
        prompts = [each for each in packable if not each.appends]
        if prompts:
            # Half of the room for the oldest, so that none starves; the rest for the shortest, which are soonest done.
            first, others = prompts[0], sorted(prompts[1:], key=lambda each: each.left)
            share = room if not others else max(room // 2, room - sum(each.left for each in others))
            for each, most in [(first, share), *((each, room) for each in others)]:
                if chosen and room < LEAST_PIECE and each.left > room:
                    break
                rows = each.piece(max(LEAST_PIECE, min(most, room)))
                chosen.append((each, rows))
                room -= rows.ids.numel()
        return chosen

    def _room(self, replies: bool) -> int:
        """Return the rows of the next pass; `replies` says whether some continue replies."""
        rows = self._pass_time.rows_in(self._pass_s if replies else WITHOUT_REPLIES * self._pass_s)
        return min(MOST_ROWS, max(2 * LEAST_PIECE, FIRST_ROWS if rows is None else rows))

    def _run(self, batch: list[tuple[_Waiting, PassRows | None]]) -> dict[_Waiting, Any]:
        """Run one batch; return the passes that are complete, with their logits or errors."""
        if batch[0][1] is None:
            return {each: self._alone(each) for each, _ in batch}
        began = time.perf_counter()
        packed = [rows for _, rows in batch if rows is not None]
        try:
            with self._busy:
                results = self._run_packed(packed)
        except BaseException as error:  # not one request's own: all of them learn of it
            return dict.fromkeys((each for each, _ in batch), error)
        self._record(packed, time.perf_counter() - began)
        finished: dict[_Waiting, Any] = {}
        for (each, rows), result in zip(batch, results, strict=True):
            assert rows is not None
            each.done += rows.ids.numel()
            if isinstance(result, Exception) or not each.left:
                finished[each] = result
        return finished

    def _alone(self, waiting: _Waiting) -> Any:
        if waiting.cancelled is not None and waiting.cancelled():
            return Cancelled("the request was given up before it was done")
        try:
            assert waiting.alone is not None
            return waiting.alone()
        except BaseException as error:
            return error

    def _record(self, packed: Sequence[PassRows], seconds: float) -> None:
        rows = sum(each.ids.numel() for each in packed)
        if rows >= 2 * LEAST_PIECE:  # passes over fewer rows are for replies
            self._pass_time.record(rows, seconds)
        stats = self.stats
        stats.passes += 1
        stats.rows += rows
        stats.requests += len(packed)
        stats.most_requests = max(stats.most_requests, len(packed))
        stats.seconds += seconds
        stats.longest_s = max(stats.longest_s, seconds)
