"""Leaves out what a reply quotes from an e-mail that is indexed itself.

A line is left out only if the other e-mail has its words, so nothing that its author has written is lost: between quoted lines, below
them, or in a quotation that was changed. No language's words for "wrote" or "original message" are needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Final

from kvweave.documents.html import Extent

_QUOTED: Final = re.compile(r"[ \t]?>")
_RULE: Final = re.compile(r"\s*[-_*=>|]{2,}.*")
_FIELD: Final = re.compile(r"\s*[>*]*[^\W\d_][\w .'-]{0,30}\*?\s?[:\uff1a]\*?(\s|$)")
"""A line of a quoted header, such as "From: Ann" or "*Gesendet:* Montag"."""

_WORD: Final = re.compile(r"\w+")
_NUMBER: Final = re.compile(r"[0-9]{1,4}")
_MAX_SEARCHED_CHARS: Final = 500_000
_MAX_ATTRIBUTION_LINES: Final = 3
_MAX_HEADER_LINES: Final = 12


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.casefold())


@dataclass(frozen=True)
class QuotedMail:
    """An indexed e-mail: its sender and date as its header has them, and its text with what it quotes itself."""

    sender: str
    date: str
    text: str

    @cached_property
    def words(self) -> str:
        """The words of the text, with a space around each."""
        return f" {' '.join(words_of(self.text[:_MAX_SEARCHED_CHARS]))} "

    def has(self, line: str) -> bool:
        """Return whether the words of a line stand next to each other in the text."""
        return f" {' '.join(words_of(line))} " in self.words

    def begins_with(self, line: str) -> bool:
        """Return whether the text begins with the words of a line that has words."""
        words = words_of(line)
        return bool(words) and self.words.startswith(f" {' '.join(words)} ")

    @cached_property
    def names(self) -> frozenset[str]:
        """The words of the sender's name and address."""
        return frozenset(word for word in words_of(self.sender) if len(word) > 1)

    @cached_property
    def _day(self) -> frozenset[int]:
        """The day of the month and the year of the date; empty without a date."""
        found = re.search(r"\b(\d{1,2})\s+[A-Za-z]{3}\s+(\d{4})\b", self.date)
        return frozenset(map(int, found.groups())) if found else frozenset()

    def is_dated_in(self, line: str) -> bool:
        """Return whether a line has the day and the year of this e-mail."""
        return bool(self._day) and self._day <= {int(each) for each in _NUMBER.findall(line)}

    def is_announced_by(self, lines: str) -> bool:
        """Return whether lines that end with a colon name this e-mail: "On Monday, 5 Jan 2026, Zoé wrote:", "Zoé wrote:"."""
        words = set(words_of(lines))
        if not lines.rstrip().endswith((":", "\uff1a")) or words.isdisjoint(self.names):
            return False
        return self.is_dated_in(lines) or len(words - self.names) <= 1


def without_quotes(text: str, extents: Sequence[Extent], mails: Sequence[QuotedMail]) -> str:
    """Return a reply's text without the lines that it quotes from these e-mails, and without what announces them.

    Args:
        text: the reply.
        extents: where it has quotations that HTML marks.
        mails: the e-mails that it answers.
    """
    reply = _Reply(text, extents)
    for mail in mails:
        reply.drop_quoted(mail)
        reply.drop_forwarded(mail)
        reply.drop_announcements(mail)
    if not any(reply.dropped):
        return text
    kept = "".join(line for line, drop in zip(reply.lines, reply.dropped, strict=True) if not drop)
    return re.sub(r"\n{3,}", "\n\n", kept).strip("\n") + "\n"


class _Reply:
    """The lines of a reply: which are marked as quoted, and which are left out."""

    def __init__(self, text: str, extents: Sequence[Extent]) -> None:
        self.lines = text.splitlines(keepends=True)
        self.dropped = [False] * len(self.lines)
        self._marked = [
            _QUOTED.match(line) is not None
            or any(first < end and end - len(line) < last for first, last in extents)
            for line, end in zip(self.lines, accumulate(map(len, self.lines)), strict=True)
        ]

    def drop_quoted(self, mail: QuotedMail) -> None:
        """Drop the lines that are marked as quoted and that the e-mail has, and blank ones beside them."""
        before = False
        for n, line in enumerate(self.lines):
            if not self._marked[n]:
                before = before and not line.strip()
                continue
            if words_of(line):
                before = mail.has(line)
            self.dropped[n] |= before

    def drop_forwarded(self, mail: QuotedMail) -> None:
        """Drop what the e-mail has below its header, which mail programs like Outlook put above an unmarked quotation.

        The header has two lines or more and names the sender, and the quotation starts where the e-mail does.
        """
        lines = self.lines
        for first in range(len(lines)):
            if self._marked[first] or self.dropped[first] or (first and _FIELD.match(lines[first - 1])):
                continue
            header = list(takewhile(_FIELD.match, lines[first : first + _MAX_HEADER_LINES]))
            if len(header) < 2 or mail.names.isdisjoint(words_of("".join(header))):
                continue
            body = first + len(header)
            others = (n for n in range(body, len(lines)) if words_of(lines[n]) and not mail.has(lines[n]))
            end = next(others, len(lines))
            if mail.begins_with(next(filter(words_of, lines[body:end]), "")):
                start = first - 1 if first and _RULE.match(lines[first - 1]) else first
                self.dropped[start:end] = [True] * (end - start)

    def drop_announcements(self, mail: QuotedMail) -> None:
        """Drop the lines above a quotation that was left out if they name the e-mail, often on two lines."""
        lines, marked = self.lines, self._marked
        for n in range(1, len(lines)):
            if not (self.dropped[n] and marked[n]) or self.dropped[n - 1]:
                continue
            last = next((at for at in range(n - 1, -1, -1) if lines[at].strip()), -1)
            for first in range(last, max(last - _MAX_ATTRIBUTION_LINES, -1), -1):
                if not lines[first].strip() or marked[first]:
                    break
                if mail.is_announced_by("".join(lines[first : last + 1])):
                    above = lines[first - 1] if first and not marked[first - 1] else ""
                    first -= mail.is_dated_in(above)
                    self.dropped[first:n] = [True] * (n - first)
                    break
