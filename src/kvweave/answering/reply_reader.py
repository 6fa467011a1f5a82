"""Reads a growing reply: keeps a reasoning model's thoughts apart from its answer, and finds where the answer ends.

Works on the text, so that it holds for any tokenizer: a token may hold the end of a line and what follows it.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kvweave.models.prompt import QUESTION_LEAD
from kvweave.types import ReplyFormat

_QUESTION: Final = QUESTION_LEAD.strip()
_LINE_END: Final = re.compile(rf"[\n\r\v\f\x85\u2028\u2029]|(?<!\S){re.escape(_QUESTION)}")


class ReplyText(NamedTuple):
    """What a reply says so far.

    Attributes:
        answer: without thoughts.
        thoughts: stripped of white space.
        ready: the beginning of the answer that later tokens cannot change.
        thinking: whether the reply is still inside its thoughts.
        ids: the tokens of the thoughts and the answer: all of them, but those behind an answer that has ended.
        ended: whether the text says that the answer has ended.
    """

    answer: str
    thoughts: str
    ready: str
    thinking: bool
    ids: list[int]
    ended: bool


class ReplyReader:
    """Reads one reply.

    Args:
        tokenizer: the model's.
        form: the format that its prompt asked for.
        stops: the answer ends before the first of these texts.
    """

    def __init__(self, tokenizer: Any, form: ReplyFormat, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._form, self._stops = tokenizer, form, stops
        opening, closing, opening_id, closing_id = form.tags
        # Some tokenizers decode these to nothing.
        self._tags = {opening_id: opening, closing_id: closing}

    def read(self, ids: Sequence[int], *, stopped: bool | None = None) -> ReplyText:
        """Return the text of the reply that these tokens make.

        `stopped` is None while tokens may follow; then whether the model ended the reply, rather than its token limit.
        """
        text = self._text(ids)
        start, thoughts, thinking = self._split(text, stopped)
        answer = text[start:]
        if thinking:
            return ReplyText("", thoughts, "", True, list(ids), False)
        # A character whose bytes are not all there yet decodes to U+FFFD: hold it back.
        ready = answer.rstrip("\ufffd")
        if not start and self._may_be_opening(text):
            ready = ""
        end = self._end(answer)
        if end is None:
            return ReplyText(answer, thoughts, self._certain(ready), False, list(ids), False)
        answer = answer[:end]
        needed = text[: start + end] if answer or thoughts else ""
        return ReplyText(answer, thoughts, answer, False, self._up_to(needed, ids), True)

    @property
    def may_end(self) -> bool:
        """Whether the text may say that the answer has ended."""
        return self._form.one_line or bool(self._stops)

    def token_count(self, answer: str, ids: Sequence[int]) -> int:
        """Return how many first tokens of a reply are needed for the beginning `answer` of its answer."""
        text = self._text(ids)
        start, _, _ = self._split(text, None)
        return len(self._up_to(text[:start] + answer, ids)) if answer else 0

    def _end(self, answer: str) -> int | None:
        """Return the offset at which its first line or a stop text ends the answer, or None while it goes on."""
        ends = [at for at in map(answer.find, self._stops) if at >= 0]
        line = _end_of_line(answer) if self._form.one_line else None
        return min([*ends, *([line] if line is not None else [])], default=None)

    def _certain(self, ready: str) -> str:
        """Return the beginning of an unfinished answer without what may turn out to be its end."""
        certain = _certain(ready) if self._form.one_line else ready
        held = max((_overlap(certain, stop) for stop in self._stops), default=0)
        return certain[: len(certain) - held]

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, tags included, without any other control token."""
        tags = [at for at, token in enumerate(ids) if token in self._tags]
        pieces = [self._decoded(ids[: tags[0]] if tags else ids)]
        for at, following in pairwise([*tags, len(ids)]):
            pieces += [self._tags[ids[at]], self._decoded(ids[at + 1 : following])]
        return "".join(pieces)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)) if ids else ""

    def _split(self, text: str, stopped: bool | None) -> tuple[int, str, bool]:
        """Return the offset of the answer, the thoughts before it, and whether the reply is still inside its thoughts."""
        mode, tags = self._form.thoughts, self._form.tags
        if mode == "none":
            return 0, "", False
        begins = len(text) - len(text.lstrip())
        marked = text.startswith(tags.opening, begins)
        first = begins + len(tags.opening) if marked else 0
        closed = text.find(tags.closing, first)
        # Without any tag, only the reply's end shows whether it was a thought: one that its limit cut counts as one.
        undecided = mode == "unmarked" and not stopped
        if not (marked or mode == "opened" or (mode == "unmarked" and closed >= 0) or undecided):
            return 0, "", False
        if closed < 0:
            return len(text), text[first:].strip(), True
        after = closed + len(tags.closing)
        after += len(text[after:]) - len(text[after:].lstrip())
        return after, text[first:closed].strip(), False

    def _may_be_opening(self, text: str) -> bool:
        """Return whether a text is the beginning of an opening tag."""
        if self._form.thoughts == "none":
            return False
        begun = text.lstrip().rstrip("\ufffd")
        return (
            bool(begun)
            and len(begun) < len(self._form.tags.opening)
            and self._form.tags.opening.startswith(begun)
        )

    def _up_to(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return the fewest first tokens whose text begins with `text`."""
        count = len(ids)
        while count and self._text(ids[: count - 1]).startswith(text):
            count -= 1
        return list(ids[:count])


def _end_of_line(answer: str) -> int | None:
    """Return the offset at which an answer ends: after its first line with text, or before it begins another question."""
    found = _LINE_END.search(answer, len(answer) - len(answer.lstrip()))
    return None if found is None else len(answer[: found.start()].rstrip())


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop text begins with, shorter than the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _certain(answer: str) -> str:
    """Return an unfinished line without what may turn out to be its end: white space, or the start of a question."""
    line = answer.rstrip()
    for length in range(min(len(_QUESTION), len(line)), 0, -1):
        before = line[: len(line) - length]
        if line.endswith(_QUESTION[:length]) and (not before or before[-1].isspace()):
            return before.rstrip()
    return line
