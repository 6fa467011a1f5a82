"""Who is told how far the conversion of a model is: it happens deep inside a call, when the model is first needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[str, int, int], None]
"""Called with the stage, units done and units in all."""


def _ignore(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


_REPORT: ContextVar[Report] = ContextVar("_REPORT", default=_ignore)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Have what is converted inside the `with` reported to `report`."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def report_to(report: Report) -> None:
    """Have everything from now on reported to `report`, outside any `reporting`."""
    _REPORT.set(report)


def current_report() -> Report:
    """Return the callback to report to."""
    return _REPORT.get()
