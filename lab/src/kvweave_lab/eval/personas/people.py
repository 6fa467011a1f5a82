"""Generated users, seeded: notes of one kind, and questions about them in order of time.

Questions are sparse and varied: most ask for something new, in one of the user's own turns of phrase. Some come back to a
fact that was asked for before, as often in other words as in the same, and most are about the few notes that the user has
in mind. Knows nothing of models, caches or chunks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kvweave_lab.eval import attributes
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.personas.pool import KINDS, Family, Pool, pool_of
from kvweave_lab.eval.world import World

NOTES: Final = 10
"""Notes of a user."""

_FACTS: Final = 3  # of a note
_AROUND: Final = 1  # natural sentences before every fact: a note is about as long as a chunk
_NUMBER_DIGITS: Final = 5
_WEIGHTS: Final = {"number": 5, "word": 2, "treasure": 2, "order": 2, "town": 2, "owns": 2, "host": 1}
_AGAIN: Final = 0.25  # of the questions ask for what was asked for before …
_SAME_WORDS: Final = 0.5  # … and of those so many in the very same words
_HABIT: Final = 0.7  # how often a user keeps to the usual turn of phrase


@dataclass(frozen=True, slots=True)
class Note:
    """A document of a user: its name and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of a user.

    Attributes:
        text: as it is asked.
        answers: references, any of which is right; whole answers.
        fact: names what it asks for: two questions with one fact have the same answer.
    """

    text: str
    answers: tuple[str, ...]
    fact: str


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with notes and questions, the earliest first; `kind` is that of the notes."""

    name: str
    kind: str
    notes: tuple[Note, ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class _Fact:
    family: Family
    values: dict[str, str]
    stated: str
    note: int

    @property
    def answer(self) -> str:
        value = self.values.get("n") or self.values["v"]
        return self.family.reply.format(**self.values) if self.family.reply else value

    @property
    def key(self) -> str:
        return f"{self.family.name} {' '.join(self.values.values())}"


def make_users(split: str, count: int, questions: int, seed: int) -> list[User]:
    """So many users of all kinds by turns; equal arguments give equal users, and a smaller count the first of them.

    Raises InvalidRequest for a split without a pool.
    """
    pool, haystack = pool_of(split), Haystack.of_split(split)
    return [_user(number, questions, seed, split, pool, haystack) for number in range(count)]


def _user(number: int, questions: int, seed: int, split: str, pool: Pool, haystack: Haystack) -> User:
    rng = random.Random(f"{split} {seed} {number}")
    kind = KINDS[number % len(KINDS)]
    world = World(rng, split)
    facts = _facts(world, kind, pool)
    around = haystack.without([fact.values[slot] for fact in facts for slot in fact.values if slot != "a"])
    notes = tuple(_note(world, kind, pool, place, facts, around) for place in range(NOTES))
    asked = _questions(rng, facts, questions)
    return User(f"{kind}-{seed}-{number}", kind, notes, tuple(asked))


def _facts(world: World, kind: str, pool: Pool) -> list[_Fact]:
    rng = world.rng
    unused = {
        name: rng.sample(listed, len(listed))
        for name in ("NUMBERS", "WORDS")
        for listed in [getattr(attributes, name)]
    }
    weights = [_WEIGHTS[family.name] for family in pool.families]
    facts = []
    for place in range(NOTES * _FACTS):
        family = rng.choices(pool.families, weights)[0]
        stated = rng.choice(list(family.stated[kind]))
        values = _values(world, family, unused)
        facts.append(
            _Fact(family, values, stated.format(**values, s=rng.choice(("He", "She"))), place // _FACTS)
        )
    return facts


def _values(world: World, family: Family, unused: dict[str, list[str]]) -> dict[str, str]:
    """Names and values for every placeholder of a family; an attribute comes again once all have come."""
    said = " ".join(family.phrasings)
    values = {}
    if family.attributes:
        left = unused[family.attributes]
        if not left:
            listed: Sequence[str] = getattr(attributes, family.attributes)
            left.extend(world.rng.sample(listed, len(listed)))
        values["a"] = left.pop()
    drawn: dict[str, Callable[[], str]] = {
        "k": world.person,
        "q": world.person,
        "t": world.town,
        "v": world.thing,
        "u": world.thing,
        "n": lambda: world.number(_NUMBER_DIGITS),
    }
    return values | {slot: draw() for slot, draw in drawn.items() if f"{{{slot}}}" in said}


def _note(
    world: World, kind: str, pool: Pool, place: int, facts: Sequence[_Fact], around: Sequence[str]
) -> Note:
    rng, frame = world.rng, pool.frames[kind]
    about = {"k": world.person(), "w": rng.choice(_TOPICS), "a": "news"}
    start = rng.randrange(len(around))
    natural = [around[(start + number) % len(around)] for number in range(_FACTS * _AROUND)]
    paragraphs = [rng.choice(list(frame.opening)).format(**about)]
    for number, fact in enumerate(fact for fact in facts if fact.note == place):
        before = natural[_AROUND * number : _AROUND * (number + 1)]
        paragraphs.append(" ".join((*before, fact.stated)))
    paragraphs.append(rng.choice(list(frame.closing)).format(**about))
    heading = rng.choice(list(frame.heading)).format(**about)
    return Note(f"{kind}-{place:02}.txt", "\n\n".join((heading, *paragraphs)) + "\n")


def _questions(rng: random.Random, facts: Sequence[_Fact], count: int) -> list[Asked]:
    in_mind = rng.sample(range(NOTES), NOTES)  # the first ones are what the user thinks about most
    weights = [1 / (1 + in_mind.index(fact.note)) for fact in facts]
    habits = {fact.family.name: rng.randrange(len(fact.family.asked)) for fact in facts}
    asked: list[tuple[_Fact, str]] = []
    for _ in range(count):
        if asked and rng.random() < _AGAIN:
            fact, words = rng.choice(asked)
            if rng.random() >= _SAME_WORDS:
                words = rng.choice([other for other in fact.family.asked if other != words])
        else:
            new = [place for place, fact in enumerate(facts) if all(fact is not old for old, _ in asked)]
            fact = facts[_drawn(rng, new or list(range(len(facts))), weights)]
            usual = fact.family.asked[habits[fact.family.name]]
            words = usual if rng.random() < _HABIT else rng.choice(list(fact.family.asked))
        asked.append((fact, words))
    return [Asked(words.format(**fact.values), (fact.answer,), fact.key) for fact, words in asked]


def _drawn(rng: random.Random, places: Sequence[int], weights: Sequence[float]) -> int:
    return rng.choices(places, cum_weights=list(accumulate(weights[place] for place in places)))[0]


_TOPICS: Final = (
    "garden budget concert office summer market library kitchen harbour workshop school festival".split()
)
