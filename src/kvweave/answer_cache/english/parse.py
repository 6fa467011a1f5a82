"""Parses an English question into a clause, from left to right by lists of function words, without a grammar.

Groups its words into runs and notes negation, tense, voice and helping verbs on the way. Returns no clause where it
cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from kvweave.answer_cache.english.lexicon import Lexicon
from kvweave.answer_cache.english.words import OWNER, Word

_QUESTION_WORDS: Final = MappingProxyType(
    {
        **{word: word for word in ("who", "whose", "what", "when", "where", "why", "how")},
        "whom": "who",
        "which": "what",
    }
)
"""Each with what it asks for."""

_GENERIC: Final = ("i", "we", "you", "one")  # "How do I …", "Where can we …": the person who asks
_ASKED_OF_ALL: Final = ("how", "where", "frequency")
_POSSESSIVES: Final = ("my", "our", "your", "his", "their", "its")
_NEEDS_NOUN: Final = ("who", "what", "whose")
_PLACES: Final = ("at", "in", "on")
_PASSIVE_FORMS: Final = ("participle", "both")


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


def parse(words: Sequence[Word], requested: bool, known: Lexicon) -> Clause | None:
    """Return the parts of a question, or None if it is not recognised as an English one.

    `requested` is whether words such as "tell me" preceded it: a bare noun is then a question too.
    """
    clause = Clause()
    if not words:
        return None
    rest = _take_question_word(_move_front_to_end(list(words), known), clause, known)
    if (
        clause.asks == "whose" and clause.fronted is None
    ):  # "Whose is the boat": nothing that is owned follows
        return None
    if not clause.asks:
        first = rest[0].text
        if first in known.helpers:
            clause.asks = "whether"
        elif first in ("if", "whether"):
            clause.asks, rest = "whether", rest[1:]
        elif requested:
            clause.asks, clause.copula = "what", True
        else:
            return None
    _ClauseBuilder(rest, clause, known).build()
    _resolve_relative_clause(clause, known)
    _strand_prepositions(clause)
    return clause


def _move_front_to_end(words: list[Word], known: Lexicon) -> list[Word]:
    """Move a phrase before the verb to the end: "On Monday, is the shop open"."""
    at = next((n for n, word in enumerate(words) if word.text in known.helpers and not word.named), 0)
    asks = any(word.text in _QUESTION_WORDS and not word.named for word in words)
    if not at or asks or words[0].text not in known.prepositions:
        return words
    return [*words[at:], replace(words[0], comma=True), *words[1:at]]


# The question word and what belongs to it


def _take_question_word(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Set `clause.asks` by the question word; return the words without it and what belongs to it.

    `clause.asks` stays empty without a question word, or if a verb precedes it: then it only starts an inner clause.
    """
    at = next((n for n, word in enumerate(words) if word.text in _QUESTION_WORDS and not word.named), None)
    if at is None or words[0].text in known.helpers:
        return words
    before, after = words[:at], words[at + 1 :]
    if before and before[-1].text in known.prepositions:
        clause.stranded = known.prepositions[before.pop().text]
    kind = _QUESTION_WORDS[words[at].text]
    if kind == "how":
        clause.asks, after = _how(after, clause, known)
    elif kind in ("what", "whose"):
        clause.asks, after = _what(kind, after, clause, known)
    else:
        clause.asks = kind
    if before and after:  # the phrase in front ends here: "On Monday, who opens …"
        after = [replace(after[0], comma=True), *after[1:]]
    return [*before, *after]


def _how(after: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """Return what "how" asks for and the rest: how many, how much, how long, how old …, how come, how."""
    first = after[0].text if after else ""
    if first == "come":
        return "why", after[1:]
    if first == "many":
        return "many", _take_counted(after[1:], clause, known)
    if first == "much":
        return _how_much(after[1:], clause, known)
    if first == "long":
        return "duration", [word for word in after[1:] if word.base != "last" or word.named]
    if first in known.measures:
        return known.measures[first], after[1:]
    return "how", after


def _how_much(after: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """Return a price for "how much does it cost", "how much is it"; an amount for "how much time", "how much of it"."""
    rest = [word for word in after if word.base != "cost"]
    if len(rest) < len(after):
        return "price", rest
    if after and after[0].text in known.be and not any(word.form in _PASSIVE_FORMS for word in after[1:]):
        return "price", after
    if after and after[0].base == "money":
        return "much", after[1:]
    return "much", _take_counted(after, clause, known)


def _take_counted(after: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Make what is counted the fronted run: how many chairs."""
    nouns = _nouns(after, known)
    clause.fronted = Run(words=nouns) if nouns else None
    return after[len(nouns) :]


def _what(kind: str, after: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """Return what is asked for by the noun ("what time"), else make the noun the fronted run: which report, whose car."""
    nouns = _nouns(after, known)
    rest = after[len(nouns) :]
    if kind == "what" and not _is_noun_phrase(nouns, rest, known):
        return "what", after
    asked = known.asks.get(nouns[0].base) if len(nouns) == 1 and not nouns[0].named else None
    if kind == "what" and asked:
        return asked, rest
    clause.fronted = Run(words=nouns) if nouns else None
    return kind, rest


def _nouns(after: Sequence[Word], known: Lexicon) -> list[Word]:
    """Return the words after a question word that belong to it."""
    nouns: list[Word] = []
    for word in after:
        if word.base[0] == "#" and len(nouns) > 1 and not nouns[-1].named:
            return nouns[:-1]  # which platform | train 12 …
        starts_another = nouns and (word.form in ("past", "both") or (word.named and not nouns[-1].named))
        is_function_word = word.text in known.function_words or word.text in _QUESTION_WORDS
        if starts_another or (is_function_word and not word.named):
            break
        nouns.append(word)
    return nouns


def _is_noun_phrase(nouns: list[Word], rest: list[Word], known: Lexicon) -> bool:
    """Return False for "what makes …", "what happened", "what Anna bought", "what Anna's password is"."""
    if not nouns or (rest and rest[0].text == OWNER):
        return False
    first = nouns[0]
    is_verb = first.form in ("past", "both") or (first.text != first.base in known.verbs and not rest)
    only_names = all(word.named and word.base[0] != "#" for word in nouns)
    return not is_verb and not only_names and bool(rest or len(nouns) > 1)


# The rest of the question


class _ClauseBuilder:
    """Adds the words after the question word to a clause, in one pass."""

    def __init__(self, words: Sequence[Word], clause: Clause, known: Lexicon) -> None:
        self._words = words
        self._clause = clause
        self._known = known
        self._run = clause.begin()
        self._after_be = self._after_have = self._after_got = False

    def build(self) -> None:
        """Add every word."""
        handlers = (
            (self._known.negations, self._negation),
            (self._known.be, self._be),
            (self._known.do, self._do),
            (self._known.have, self._have),
            (self._known.modals, self._modal),
            (self._known.articles, self._article),
            (self._known.prepositions, self._preposition),
            (self._known.pronouns, self._pronoun),
            ((OWNER,), self._owner),
        )
        for at, word in enumerate(self._words):
            if word.comma and self._run.words:
                self._run = self._clause.begin()
            if word.text in _QUESTION_WORDS or word.text == "that":
                self._after_be = False  # an inner clause: its participle is no passive of the verb before
            if self._after_got:  # who has got
                self._after_got = False
            elif word.named or word.text not in self._known.function_words:
                self._content(word)
            else:
                for members, add in handlers:
                    if word.text in members:
                        add(word, at)
                        break

    def _next(self, at: int) -> Word | None:
        return self._words[at + 1] if at + 1 < len(self._words) else None

    def _content(self, word: Word) -> None:
        clause = self._clause
        self._run.words.append(word)
        if word.named:
            return
        if word.form in _PASSIVE_FORMS and self._after_be and clause.verb is None:
            clause.passive, clause.verb, clause.copula = True, word, False
        elif word.form in ("past", "both") and not self._after_have and not clause.has_helper:
            clause.tense = "past"
        if word.form == "ing" and self._after_be:
            clause.copula = False

    def _negation(self, word: Word, at: int) -> None:
        self._clause.negated = True
        if word.text not in ("not", "no"):
            self._run.words.append(word)

    def _be(self, word: Word, at: int) -> None:
        self._after_be = self._clause.copula = True
        if word.text in ("was", "were"):
            self._clause.tense = "past"
        self._run = self._clause.begin()

    def _do(self, word: Word, at: int) -> None:
        verbs = self._known.do | self._known.have
        after = self._words[at + 1 :]
        helps = at == 0 or any(other.base in self._known.verbs or other.text in verbs for other in after)
        if not helps or word.text in ("doing", "done"):  # "what does Anna do" has both
            self._run.words.append(word)
            return
        self._clause.has_helper = self._clause.do_support = True
        if word.text == "did":
            self._clause.tense = "past"
        self._run = self._clause.begin()

    def _have(self, word: Word, at: int) -> None:
        following = self._next(at)
        self._after_got = following is not None and following.text == "got"
        opens = at == 0 and self._clause.asks == "whether"
        if not self._after_got and (opens or self._is_perfect(at)):
            self._after_have = True
            self._clause.tense = "past"
            self._run = self._clause.begin()
            return
        if word.text == "had":
            self._clause.tense = "past"
        self._run.words.append(Word("have", "have"))

    def _is_perfect(self, at: int) -> bool:
        """Return whether a participle follows before anything that `have` does not extend over."""
        ends = self._known.be | self._known.do | self._known.prepositions.keys()
        for word in self._words[at + 1 :]:
            if word.form in _PASSIVE_FORMS or word.text == "been":
                return not word.named
            if word.text in ends:
                return False
        return False

    def _modal(self, word: Word, at: int) -> None:
        self._clause.has_helper = True
        if word.text in ("will", "shall"):
            self._clause.tense = "future"
        elif word.text != "would":
            self._clause.modal = "can" if word.text in ("could", "may") else word.text
        self._run = self._clause.begin()

    def _article(self, word: Word, at: int) -> None:
        if self._run.words or not self._run.preposition:
            self._run = self._clause.begin()
        self._run.article = True

    def _preposition(self, word: Word, at: int) -> None:
        following = self._next(at)
        if word.text == "over" and following is not None and following.base[0] == "#":  # more than
            self._run.words.append(Word("more", "more"))
            self._run = self._clause.begin("than")
        elif word.text == "to" and following is not None and self._is_verb(following):  # an infinitive
            self._run.words.append(word)
        else:
            self._run = self._clause.begin(self._known.prepositions[word.text])

    def _is_verb(self, word: Word) -> bool:
        return word.base in self._known.verbs and not word.named

    def _owner(self, word: Word, at: int) -> None:
        self._run.owners = len(self._run.words)

    def _pronoun(self, word: Word, at: int) -> None:
        who, run, clause = self._known.pronouns[word.text], self._run, self._clause
        possessive = word.text in _POSSESSIVES
        of_all = clause.asks in _ASKED_OF_ALL and clause.has_helper
        if who in _GENERIC and of_all and not possessive and not run.words:
            clause.generic = True
            return
        if possessive and (run.words or not run.preposition):
            self._run = clause.begin()
        self._run.words.append(Word(who, who, named=True))


def _resolve_relative_clause(clause: Clause, known: Lexicon) -> None:
    """Treat "what are the songs Anna knows" as "which songs does Anna know"."""
    first = next((run for run in clause.runs if run.words), Run())
    names = next((n for n, word in enumerate(first.words) if word.named), 0)
    fits = clause.asks == "what" and clause.copula and clause.fronted is None
    if not (fits and names and first.article and not first.preposition):
        return
    *middle, verb = first.words[names:]
    if verb.named or verb.base not in known.verbs or not all(word.named for word in middle):
        return
    nouns = first.words[:names]
    asked = known.asks.get(nouns[-1].base) if len(nouns) == 1 else None
    clause.asks, clause.fronted = asked or "what", None if asked else Run(words=nouns)
    clause.copula, clause.do_support = False, True
    first.words, first.article = first.words[names:], False


def _strand_prepositions(clause: Clause) -> None:
    """Give a preposition without a noun to the question word: "who was it written by"."""
    for run in clause.runs:
        if run.preposition and not run.words:
            if clause.asks in (*_NEEDS_NOUN, "where"):
                clause.stranded = clause.stranded or run.preposition
            elif run.preposition not in _PLACES:
                run.words.append(Word(run.preposition, run.preposition))
    clause.runs = [run for run in clause.runs if run.words]
    implied = (*_PLACES, "to", "for") if clause.asks in ("where", "why", "duration") else _PLACES
    if clause.asks not in _NEEDS_NOUN and clause.stranded in implied:
        clause.stranded = ""  # at what time, for what reason, where … to
