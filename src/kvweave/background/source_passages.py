"""Passages of notes, and words in them that a question may ask for: names, numbers, dates.

Small base models do not choose what to ask. Given an answer they write its question (Alberti et al. 2019, §2.2).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvweave.text import MONTHS, SMALL_NUMBERS, TENS, content_stems

PASSAGE_WORDS: Final = 45
"""Words after which a passage ends with its sentence: small models lose the middle of longer notes."""

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[-*#|])")
_NUMBER_WORDS: Final = "|".join([*SMALL_NUMBERS[2:], *TENS, "a hundred", "hundred"])
_MONTHS: Final = "|".join(map(str.title, MONTHS))
_TITLES: Final = "Mr|Mrs|Ms|Miss|Dr|Prof|Sir|Sister|Father|Colonel"
_NO_UNIT: Final = (
    "and|at|but|by|each|for|from|had|has|have|he|her|his|in|into|is|it|more|not|of|on|only|or|our|out|said|she|so|than|that"
    "|the|then|there|they|till|to|until|was|we|were|when|which|who|will|with|would|you"
)
_NO_NAME: Final = "A|An|And|As|At|But|By|For|From|He|His|If|In|It|No|Not|On|Our|She|That|The|There|They|This|To|We|What|When|You"
_NAME: Final = r"(?:[A-Z][\w-]+|[A-Z](?=['’][A-Z]))(?:['’](?!s\b)[\w-]+)?"  # O'Neill, and Anna of "Anna's"
_ANSWER: Final = re.compile(
    rf"""\b\d{{1,2}}(?:st|nd|rd|th)?\s(?:of\s)?(?:{_MONTHS})\b
       | [£$€]\d[\d,.]*\d(?:\s(?:million|thousand))?
       | (?<![\w/.,:])\d[\d,.:]*\s(?:%|per\scent|(?!(?:{_NO_UNIT})\b)[a-z]{{2,}}\b)
       | (?<![\w/.,:])\d[\d,.:]*\d\b(?!/)
       | \b(?:{_NUMBER_WORDS})\s(?!(?:{_NO_UNIT})\b)[a-z]{{3,}}\b
       | \b(?:{_TITLES})\.?(?:\s{_NAME})+
       | (?<=[a-z,;]\s)(?!(?:{_NO_NAME}|{_MONTHS})\b){_NAME}(?:\s(?:of\s|the\s|&\s)?{_NAME})*""",
    re.VERBOSE,
)


_OPENINGS: Final = (
    ("When", re.compile(rf"\b(?:{_MONTHS})\b|day\b|^\d\d?[:.]\d\d\b")),
    ("How much", re.compile(r"[£$€]|crowns|pounds|euros|dollars")),
    ("What percentage", re.compile(r"%|per\scent")),
    ("How long", re.compile(r"(?:year|month|week|day|hour|minute)s?$")),
    ("How many", re.compile(rf"^(?:\d|(?:{_NUMBER_WORDS})\s)")),
    ("Who", re.compile(rf"^(?:{_TITLES})\b")),
    ("Which", re.compile("")),
)
"""How a question for an answer begins: the first of these that the answer fits."""


class Asked(NamedTuple):
    """A passage and words in it that a question is to ask for."""

    passage: str
    answer: str

    @property
    def opening(self) -> str:
        """How the question begins."""
        return next(opening for opening, form in _OPENINGS if form.search(self.answer))


def passages(text: str) -> Iterator[str]:
    """Yield a text in pieces of whole sentences, each of about PASSAGE_WORDS words."""
    words: list[str] = []
    for sentence in _SENTENCE.split(text):
        words += sentence.split()
        if len(words) >= PASSAGE_WORDS:
            yield " ".join(words)
            words = []
    if words:
        yield " ".join(words)


def answers_in(text: str) -> list[Asked]:
    """Return the answers that a text holds, each once: the first of every passage, then the second ones, …"""
    ranked: dict[str, tuple[int, Asked]] = {}
    for passage in passages(text):
        found = dict.fromkeys(match.group().strip(" .,:") for match in _ANSWER.finditer(passage))
        for place, answer in enumerate(found):
            ranked.setdefault(answer.casefold(), (place, Asked(passage, answer)))
    return [asked for _, asked in sorted(ranked.values(), key=lambda each: each[0])]


def shared_words(text: str, questions: Sequence[str]) -> int:
    """Return how many content words a text shares with questions."""
    return len(content_stems(questions) & content_stems([text]))


def nearest_first(asked: Sequence[Asked], questions: Sequence[str]) -> list[Asked]:
    """Return the same, those first whose passages share most content words with questions."""
    return sorted(asked, key=lambda each: -shared_words(each.passage, questions))
