"""What the terminal gets and gives: text whose control characters do nothing to it, and Ctrl-C with the message after it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

CONTROL: Final[dict[int, int]] = {
    **{number: 0x2400 + number for number in range(0x20) if chr(number) not in "\t\n"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
}
"""Unicode's symbols for control characters, as `str.translate` takes them. Tabs and line ends stay as they are."""

KEPT = "interrupted: finished work is kept; run the same command again to continue"
NOTHING_KEPT = "interrupted: nothing is kept; the same command starts over"

_P = ParamSpec("_P")


def harmless(text: str) -> str:
    """Return the text with symbols in place of its control characters."""
    return text.translate(CONTROL)


def prints_unicode() -> bool:
    """Whether standard output takes any character."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def echo(text: str = "", *, end: str = "\n", err: bool = False) -> None:
    """Print text at once, with symbols in place of its control characters."""
    print(harmless(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


class NothingKept(KeyboardInterrupt):
    """Ctrl-C in a command that keeps nothing. Its text is the message for the user."""


def keeps_nothing(command: Callable[_P, None], said: str = NOTHING_KEPT) -> Callable[_P, None]:
    """Mark a command that starts over when it is run again. Most commands keep their finished work."""

    @wraps(command)
    def marked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BaseException as error:
            if interrupt_behind(error) is None:
                raise
            raise NothingKept(said) from error

    return marked


def interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that caused an error, or None. transformers wraps one that arrives during its import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def message(interrupt: KeyboardInterrupt | None) -> str:
    """Return the message to print after Ctrl-C."""
    return str(interrupt) if isinstance(interrupt, NothingKept) else KEPT
