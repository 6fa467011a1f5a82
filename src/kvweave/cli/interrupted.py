"""Ctrl-C: what a command keeps of its work then, and the words that say so.

Most commands keep what was finished. Those that do not are marked here. Knows nothing of what any of them does.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec

KEPT = "interrupted: what was finished is kept; run the same command again to go on"
NOTHING_KEPT = "interrupted: nothing is kept; the same command begins anew"
NOTHING_WITHOUT_OUTPUT = "interrupted: nothing is kept without --output; the same command begins anew"

_P = ParamSpec("_P")


class NothingKept(KeyboardInterrupt):
    """Ctrl-C in a command of which nothing is kept; its text says that to the user."""


def keeps_nothing(command: Callable[_P, None]) -> Callable[_P, None]:
    """Mark a command that begins anew when it is run again."""
    return _marked(command, NOTHING_KEPT, lambda given: False)


def keeps_output(command: Callable[_P, None]) -> Callable[_P, None]:
    """Mark a command that goes on from what is in its `output`, and begins anew where it was given none."""
    return _marked(command, NOTHING_WITHOUT_OUTPUT, lambda given: given.get("output") is not None)


def _marked(
    command: Callable[_P, None], said: str, kept: Callable[[Mapping[str, object]], bool]
) -> Callable[_P, None]:
    """The command, interrupted with the words `said` unless its options say that its work is `kept`."""

    @wraps(command)
    def marked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            if kept(kwargs) or interrupt_behind(error) is None:
                raise
            raise NothingKept(said) from error

    return marked


def interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Ctrl-C at the bottom of an error: transformers turns one that comes while it imports into its own error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def said(interrupt: KeyboardInterrupt | None) -> str:
    """One sentence for the user."""
    return str(interrupt) if isinstance(interrupt, NothingKept) else KEPT
