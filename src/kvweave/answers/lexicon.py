"""What the reading of a question knows about English words; the words themselves stand in lexicon.toml."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources


@dataclass(frozen=True)
class Lexicon:
    """Everything lexicon.toml says, in the shape in which it is asked for.

    `openings` and `closings` match what stands around a question. `prepositions` maps each to the first of its kind,
    `alike` each word to the one it is read as, with `_` between the words of an expression, of which `longest` is the
    number of words. `rewritten` are beginnings and what they come to. `past` and `participles` map irregular forms to their base.
    """

    openings: tuple[re.Pattern[str], ...]
    closings: tuple[re.Pattern[str], ...]
    empty: frozenset[str]
    articles: frozenset[str]
    be: frozenset[str]
    do: frozenset[str]
    have: frozenset[str]
    modals: frozenset[str]
    negations: frozenset[str]
    somebody: frozenset[str]
    bound_to_now: frozenset[str]
    shifting: frozenset[str]
    units_of_time: frozenset[str]
    prepositions: Mapping[str, str]
    asks: Mapping[str, str]
    measures: Mapping[str, str]
    pronouns: Mapping[str, str]
    alike: Mapping[str, str]
    longest: int
    rewritten: tuple[tuple[re.Pattern[str], str], ...]
    makers: Mapping[str, str]
    dated: frozenset[str]
    agents: Mapping[str, str]
    events: frozenset[str]
    placed: frozenset[str]
    paying: frozenset[str]
    signs: frozenset[str]
    past: Mapping[str, str]
    participles: Mapping[str, str]
    plurals: Mapping[str, str]
    verbs: frozenset[str]

    @cached_property
    def helpers(self) -> frozenset[str]:
        """Verbs that may begin a question."""
        return self.be | self.do | self.have | self.modals

    @cached_property
    def function_words(self) -> frozenset[str]:
        """Words that say how others belong together, and those that say nothing."""
        more = (self.negations, self.articles, self.prepositions, self.pronouns, self.empty)
        return self.helpers.union(*more, ("'s",))


@cache
def lexicon() -> Lexicon:
    """The lexicon, read once."""
    told = tomllib.loads(lexicon_text())
    words = told["words"]
    alike = {word: line.split()[0] for line in words["alike"] for word in line.split()}
    irregular = [form.split(":") for form in words["irregular"].split()]
    verbs = frozenset(words["verbs"].split()) | {base for base, _, _ in irregular}
    sets = (
        "empty",
        "articles",
        "be",
        "do",
        "have",
        "modals",
        "somebody",
        "negations",
        "bound_to_now",
        "shifting",
    )
    return Lexicon(
        openings=tuple(re.compile(one, re.IGNORECASE) for one in told["openings"]),
        closings=tuple(re.compile(one, re.IGNORECASE) for one in told["closings"]),
        **{name: frozenset(told[name].split()) for name in sets},
        units_of_time=frozenset(told["units_of_time"].split()),
        prepositions=_by_member(told["prepositions"]),
        asks=_by_member(told["asks"]),
        measures=_by_member(told["measures"]),
        pronouns=_by_member(told["pronouns"]),
        alike=alike,
        rewritten=tuple((re.compile(one, re.IGNORECASE), into) for one, into in told["rewritten"]),
        makers=_pairs(words["makers"]),
        dated=frozenset(words["dated"].split()),
        longest=max(word.count("_") + 1 for word in alike),
        agents=_pairs(words["agents"]),
        events=frozenset(words["events"].split()),
        paying=frozenset(words["paying"].split()),
        signs=frozenset(words["signs"].split()),
        placed=frozenset(words["placed"].split()),
        past={past: base for base, past, _ in irregular if past != base},
        participles={participle: base for base, _, participle in irregular},
        plurals=_pairs(words["plurals"]),
        verbs=verbs | {alike[word] for word in verbs & alike.keys()},
    )


def lexicon_text() -> str:
    """The file as it is."""
    return (resources.files(__package__) / "lexicon.toml").read_text("utf-8")


def _by_member(groups: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, members in groups.items() for word in members.split()}


def _pairs(text: str) -> dict[str, str]:
    return {one: other for one, _, other in (pair.partition(":") for pair in text.split())}
