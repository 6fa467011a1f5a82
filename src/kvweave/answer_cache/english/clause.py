"""A question taken apart: what it asks for, its runs of words with the preposition before each, its voice and tense."""

from dataclasses import dataclass, field
from typing import Final

from kvweave.answer_cache.english.words import Word

PASSIVE_FORMS: Final = ("participle", "both")


@dataclass(slots=True)
class Run:
    """Words that follow each other without a function word between them, behind `preposition` or none.

    `article` is whether an article stands before them. `said_last` is their last one as they were said, where what "of"
    introduces was put before what it belongs to since then; `owners` is how many words stand before an "'s", 0 without one.
    """

    preposition: str = ""
    article: bool = False
    words: list[Word] = field(default_factory=list)
    said_last: Word | None = None
    owners: int = 0

    @property
    def last(self) -> Word:
        """The word that was said last."""
        return self.said_last or self.words[-1]


@dataclass(slots=True)
class Clause:
    """A question taken apart; filled part by part.

    Attributes:
        asks: the kind of answer.
        runs: its words in order, function words left out.
        fronted: the run that belongs to the question word ("which report"), None without one.
        stranded: the preposition that belongs to the question word ("by whom", "who … by"), or nothing.
        negated: whether anything in it is negative.
        tense: past, present or future.
        helped: whether `do` or a modal stands before subject and verb.
        supported: whether that is `do`.
        passive: whether a form of `be` stands before a participle.
        verb: that participle.
        copula: whether its only verb is a form of `be`.
        modal: can, must, …; nothing for those that only make a tense.
        generic: whether it is about whoever asks: "How do I …".
    """

    asks: str = ""
    runs: list[Run] = field(default_factory=list)
    fronted: Run | None = None
    stranded: str = ""
    negated: bool = False
    tense: str = "present"
    helped: bool = False
    supported: bool = False
    passive: bool = False
    verb: Word | None = None
    copula: bool = False
    modal: str = ""
    generic: bool = False

    def begin(self, preposition: str = "") -> Run:
        """Begin another run."""
        self.runs.append(Run(preposition))
        return self.runs[-1]
