"""The parts of a question: what it asks for, its groups of words, its voice and tense. Filled by `parse`."""

from dataclasses import dataclass, field
from typing import Final

from kvweave.answer_cache.english.words import Word

PASSIVE_FORMS: Final = ("participle", "both")


@dataclass(slots=True)
class Run:
    """Consecutive words without a function word between them.

    Attributes:
        preposition: the one before them, or empty.
        article: whether an article precedes them.
        words: in order.
        spoken_last: the last word as spoken, where an "of" phrase was moved before its noun since; else None.
        owners: number of words before an "'s"; 0 without one.
    """

    preposition: str = ""
    article: bool = False
    words: list[Word] = field(default_factory=list)
    spoken_last: Word | None = None
    owners: int = 0

    @property
    def last(self) -> Word:
        """The word that was spoken last."""
        return self.spoken_last or self.words[-1]


@dataclass(slots=True)
class Clause:
    """A question in parts.

    Attributes:
        asks: the kind of answer.
        runs: its groups of words in order, without function words.
        fronted: the noun of the question word ("which report"); None without one.
        stranded: the preposition of the question word ("by whom", "who … by"), or empty.
        negated: whether anything in it is negative.
        tense: past, present or future.
        has_helper: whether `do` or a modal precedes subject and verb.
        do_support: whether that is `do`.
        passive: whether a form of `be` precedes a participle.
        verb: that participle.
        copula: whether its only verb is a form of `be`.
        modal: can, must, …; empty for a modal that only makes a tense.
        generic: whether it is about the person who asks: "How do I …".
    """

    asks: str = ""
    runs: list[Run] = field(default_factory=list)
    fronted: Run | None = None
    stranded: str = ""
    negated: bool = False
    tense: str = "present"
    has_helper: bool = False
    do_support: bool = False
    passive: bool = False
    verb: Word | None = None
    copula: bool = False
    modal: str = ""
    generic: bool = False

    def begin(self, preposition: str = "") -> Run:
        """Append an empty run and return it."""
        self.runs.append(Run(preposition))
        return self.runs[-1]
