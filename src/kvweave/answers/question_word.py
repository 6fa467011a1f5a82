"""What a question asks for: its question word and the words that belong to it."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from kvweave.answers.clause import PASSIVE_FORMS, Clause, Run
from kvweave.answers.lexicon import Lexicon
from kvweave.answers.words import OWNER, Word

QUESTION_WORDS: Final = MappingProxyType(
    {
        **{word: word for word in ("who", "whose", "what", "when", "where", "why", "how")},
        "whom": "who",
        "which": "what",
    }
)
"""Each with what it asks for."""


def take_question_word(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Settle what the clause asks for by its question word; returns the words without it and what belongs to it.

    Without a question word, or with a verb before it (then it only begins a clause inside), `clause.asks` stays empty.
    """
    at = next((n for n, word in enumerate(words) if word.text in QUESTION_WORDS and not word.named), None)
    if at is None or words[0].text in known.helpers:
        return words
    before, behind = words[:at], words[at + 1 :]
    if before and before[-1].text in known.prepositions:
        clause.stranded = known.prepositions[before.pop().text]
    kind = QUESTION_WORDS[words[at].text]
    if kind == "how":
        clause.asks, behind = _how(behind, clause, known)
    elif kind in ("what", "whose"):
        clause.asks, behind = _what(kind, behind, clause, known)
    else:
        clause.asks = kind
    if before and behind:  # the phrase in front ends here: "On Monday, who opens …"
        behind = [replace(behind[0], comma=True), *behind[1:]]
    return [*before, *behind]


def _how(behind: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """how many, how much, how long, how old …, how come, how."""
    first = behind[0].text if behind else ""
    if first == "come":
        return "why", behind[1:]
    if first == "many":
        return "many", _counted(behind[1:], clause, known)
    if first == "much":
        return _how_much(behind[1:], clause, known)
    if first == "long":
        return "duration", [word for word in behind[1:] if word.base not in ("last", "take") or word.named]
    if first in known.measures:
        return known.measures[first], behind[1:]
    return "how", behind


def _how_much(behind: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """how much does it cost, how much is it: its price; how much time, how much of it: an amount."""
    rest = [word for word in behind if word.base != "cost"]
    if len(rest) < len(behind):
        return "price", rest
    if behind and behind[0].text in known.be and not any(word.form in PASSIVE_FORMS for word in behind[1:]):
        return "price", behind
    if behind and behind[0].base == "money":
        return "much", behind[1:]
    return "much", _counted(behind, clause, known)


def _counted(behind: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """How many of what: the fronted run."""
    nouns = _nouns(behind, known)
    clause.fronted = Run(words=nouns) if nouns else None
    return behind[len(nouns) :]


def _what(kind: str, behind: list[Word], clause: Clause, known: Lexicon) -> tuple[str, list[Word]]:
    """what time, which report, whose car: the noun may say what is asked for; else it is the fronted run."""
    nouns = _nouns(behind, known)
    rest = behind[len(nouns) :]
    if kind == "what" and not _is_noun_phrase(nouns, rest, known):
        return "what", behind
    asked = known.asks.get(nouns[0].base) if len(nouns) == 1 and not nouns[0].named else None
    if kind == "what" and asked:
        return asked, rest
    clause.fronted = Run(words=nouns)
    return kind, rest


def _nouns(behind: Sequence[Word], known: Lexicon) -> list[Word]:
    """The words right behind a question word that belong to it."""
    nouns: list[Word] = []
    for word in behind:
        if word.base[0] == "#" and len(nouns) > 1 and not nouns[-1].named:
            return nouns[:-1]  # which platform | train 12 …
        starts_anew = nouns and (word.form in ("past", "both") or (word.named and not nouns[-1].named))
        is_function_word = word.text in known.function_words or word.text in QUESTION_WORDS
        if starts_anew or (is_function_word and not word.named):
            break
        nouns.append(word)
    return nouns


def _is_noun_phrase(nouns: list[Word], rest: list[Word], known: Lexicon) -> bool:
    """Not in "what makes …", "what happened", "what Anna bought", "what Anna's password is"."""
    if not nouns or (rest and rest[0].text == OWNER):
        return False
    first = nouns[0]
    is_verb = first.form in ("past", "both") or (first.text != first.base in known.verbs and not rest)
    only_names = all(word.named and word.base[0] != "#" for word in nouns)
    return not is_verb and not only_names and bool(rest or len(nouns) > 1)
