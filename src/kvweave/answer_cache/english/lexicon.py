"""The English word lists of lexicon.toml, in the shape in which the other modules look words up."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Final

_SETS: Final = (
    "fillers",
    "articles",
    "be",
    "do",
    "have",
    "modals",
    "indefinite",
    "negations",
    "homographs",
    "time_sensitive",
    "few",
    "relative",
    "units_of_time",
)
_WORD_SETS: Final = ("dated", "events", "placed", "paying", "identifiers")
_GROUPS: Final = ("prepositions", "asks", "measures", "pronouns")
_PAIRS: Final = ("agents", "makers", "plurals")


@dataclass(frozen=True)
class Lexicon:
    """The content of lexicon.toml; its comments say what each list is for.

    Attributes:
        openings: patterns of phrases in front of a question.
        closings: patterns of phrases behind a question.
        rewrites: patterns of roundabout beginnings, each with its replacement.
        prepositions: each with the first preposition of its group.
        synonyms: each word with the first one of its group; `_` joins the words of an expression.
        longest: number of words in the longest such expression.
        past: irregular past forms with their base.
        participles: irregular participles with their base.
    """

    openings: tuple[re.Pattern[str], ...]
    closings: tuple[re.Pattern[str], ...]
    rewrites: tuple[tuple[re.Pattern[str], str], ...]
    fillers: frozenset[str]
    articles: frozenset[str]
    be: frozenset[str]
    do: frozenset[str]
    have: frozenset[str]
    modals: frozenset[str]
    indefinite: frozenset[str]
    negations: frozenset[str]
    homographs: frozenset[str]
    time_sensitive: frozenset[str]
    few: frozenset[str]
    relative: frozenset[str]
    units_of_time: frozenset[str]
    prepositions: Mapping[str, str]
    asks: Mapping[str, str]
    measures: Mapping[str, str]
    pronouns: Mapping[str, str]
    synonyms: Mapping[str, str]
    longest: int
    agents: Mapping[str, str]
    makers: Mapping[str, str]
    dated: frozenset[str]
    events: frozenset[str]
    placed: frozenset[str]
    paying: frozenset[str]
    identifiers: frozenset[str]
    past: Mapping[str, str]
    participles: Mapping[str, str]
    plurals: Mapping[str, str]
    verbs: frozenset[str]

    @cached_property
    def helpers(self) -> frozenset[str]:
        """Verbs that a yes-or-no question can start with."""
        return self.be | self.do | self.have | self.modals

    @cached_property
    def function_words(self) -> frozenset[str]:
        """Words that only relate others, and fillers."""
        more = (self.negations, self.articles, self.prepositions, self.pronouns, self.fillers)
        return self.helpers.union(*more, ("'s",))

    @cached_property
    def single_words(self) -> frozenset[str]:
        """Every word that is listed, whatever for."""
        tables = (
            self.asks,
            self.measures,
            self.synonyms,
            self.nouns_to_verbs,
            self.past,
            self.participles,
            self.plurals,
        )
        lists = (
            self.verbs,
            self.dated,
            self.events,
            self.placed,
            self.paying,
            self.identifiers,
            self.units_of_time,
        )
        return self.function_words.union(*tables, *lists)

    @cached_property
    def nouns_to_verbs(self) -> Mapping[str, str]:
        """Agents and makers, each with its verb: owner → own, author → write."""
        return {**self.agents, **self.makers}


@cache
def lexicon() -> Lexicon:
    """Return the lexicon, loaded once."""
    content = tomllib.loads(lexicon_text())
    words = content["words"]
    synonyms = {word: line.split()[0] for line in words["synonyms"] for word in line.split()}
    lists: dict[str, Any] = {
        **{name: frozenset(content[name].split()) for name in _SETS},
        **{name: frozenset(words[name].split()) for name in _WORD_SETS},
        **{name: _by_member(content[name]) for name in _GROUPS},
        **{name: _pairs(words[name]) for name in _PAIRS},
        **_verb_forms(words, synonyms),
    }
    return Lexicon(
        openings=tuple(re.compile(pattern, re.IGNORECASE) for pattern in content["openings"]),
        closings=tuple(re.compile(pattern, re.IGNORECASE) for pattern in content["closings"]),
        rewrites=tuple(
            (_with_parts(pattern, content["parts"]), text) for pattern, text in content["rewrites"]
        ),
        synonyms=synonyms,
        longest=max(word.count("_") + 1 for word in synonyms),
        **lists,
    )


def lexicon_text() -> str:
    """Return the text of lexicon.toml."""
    return (resources.files(__package__) / "lexicon.toml").read_text("utf-8")


def _with_parts(pattern: str, parts: Mapping[str, str]) -> re.Pattern[str]:
    for name, part in parts.items():
        pattern = pattern.replace(f"<{name}>", part)
    return re.compile(pattern, re.IGNORECASE)


def _verb_forms(words: Mapping[str, str], synonyms: Mapping[str, str]) -> dict[str, Any]:
    irregular = [form.split(":") for form in words["irregular"].split()]
    verbs = frozenset(words["verbs"].split()) | {base for base, _, _ in irregular}
    return {
        "past": {past: base for base, past, _ in irregular if past != base},
        "participles": {participle: base for base, _, participle in irregular},
        "verbs": verbs | {synonyms[word] for word in verbs & synonyms.keys()},
    }


def _by_member(groups: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, members in groups.items() for word in members.split()}


def _pairs(text: str) -> dict[str, str]:
    return {one: other for one, _, other in (pair.partition(":") for pair in text.split())}
