"""Whether an answer says only what its context says; the default needs no model, a judge may be one."""

import re
from collections.abc import Sequence
from typing import ClassVar, Protocol

_PART = re.compile(r"[,;\n]+")
_WORD = re.compile(r"\w+(?:-\w+|(?<=\d)\.\d+)*")  # a UUID and 3.5 are one word each
_LIST_WORDS = 3  # a longer part is a sentence, whose small words are no facts


class Judge(Protocol):
    """Decides how much of an answer its context bears out; a judge model has a name and this one method."""

    @property
    def name(self) -> str:
        """What tells its verdicts from another judge's."""
        ...

    def share(self, answer: str, chunks: Sequence[str]) -> float:
        """Share of the answer's facts that the chunks hold, 0..1."""


class ContainedFacts:
    """A fact is borne out if its word stands in a chunk, in any case of letters.

    Exact on generated tasks, whose values are single words that no other sentence uses. On free text it is an
    estimate from below for paraphrase and from above for names and numbers in the wrong place.
    """

    name: ClassVar[str] = "contained facts"

    def share(self, answer: str, chunks: Sequence[str]) -> float:
        """Share of `facts(answer)` in the chunks; an answer without any fact has nothing to show for itself: 0."""
        stated = facts(answer)
        known = {word.lower() for chunk in chunks for word in _WORD.findall(chunk)}
        return sum(fact in known for fact in stated) / len(stated) if stated else 0.0


def facts(answer: str) -> tuple[str, ...]:
    """The different values that an answer states, in lower case, in order.

    Between commas, semicolons and line ends, up to three words are values. More are a sentence, and its values are
    its numbers and names (words with a digit, or with a capital letter behind the first word), or all its words
    if it has neither.
    """
    found: dict[str, None] = {}
    for part in _PART.split(answer):
        words: list[str] = _WORD.findall(part)
        if len(words) > _LIST_WORDS:
            words = [
                word for place, word in enumerate(words) if _numbers(word) or (place and _named(word))
            ] or words
        found |= dict.fromkeys(word.lower() for word in words)
    return tuple(found)


def _numbers(word: str) -> bool:
    return any(sign.isdigit() for sign in word)


def _named(word: str) -> bool:
    return word != word.lower()
