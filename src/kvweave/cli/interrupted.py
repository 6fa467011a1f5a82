"""The message after Ctrl-C, which says whether the command kept its finished work.

Most commands keep it. The decorators here mark those that do not.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

KEPT = "interrupted: finished work is kept; run the same command again to continue"
NOTHING_KEPT = "interrupted: nothing is kept; the same command starts over"
NOTHING_WITHOUT_OUTPUT = "interrupted: nothing is kept without --output; the same command starts over"

_P = ParamSpec("_P")


class NothingKept(KeyboardInterrupt):
    """Ctrl-C in a command that keeps nothing. Its text is the message for the user."""


def keeps_nothing(command: Callable[_P, None]) -> Callable[_P, None]:
    """Mark a command that starts over when it is run again."""
    return _marked(command, NOTHING_KEPT)


def keeps_output(command: Callable[_P, None]) -> Callable[_P, None]:
    """Mark a command that continues from its `output` folder, and starts over without one."""
    return _marked(command, NOTHING_WITHOUT_OUTPUT, unless="output")


def _marked(command: Callable[_P, None], message: str, unless: str = "") -> Callable[_P, None]:
    """Return the command with Ctrl-C raised as NothingKept(message), unless it is given this option."""

    @wraps(command)
    def marked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            if kwargs.get(unless) is not None or interrupt_behind(error) is None:
                raise
            raise NothingKept(message) from error

    return marked


def interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that caused an error, or None. transformers wraps one that arrives during its import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def message(interrupt: KeyboardInterrupt | None) -> str:
    """Return the message to print after Ctrl-C."""
    return str(interrupt) if isinstance(interrupt, NothingKept) else KEPT
