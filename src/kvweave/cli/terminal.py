"""Prints text of documents and names of files, whose control characters must do nothing to the terminal."""

import sys
from typing import Final

CONTROL: Final[dict[int, int]] = {
    **{number: 0x2400 + number for number in range(0x20) if chr(number) not in "\t\n"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
}
"""Unicode's symbols for control characters, as `str.translate` takes them. Tabs and line ends stay as they are."""


def harmless(text: str) -> str:
    """Return the text with symbols in place of its control characters."""
    return text.translate(CONTROL)


def prints_unicode() -> bool:
    """Whether standard output takes any character."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def echo(text: str = "", *, end: str = "\n", err: bool = False) -> None:
    """Print text at once, with symbols in place of its control characters."""
    print(harmless(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)
