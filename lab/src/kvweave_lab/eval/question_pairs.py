"""Pairs of questions: paraphrases, which should share an answer, and look-alikes, which must not.

They come from a file, or are drawn from a seed. A split's families of questions are in its TOML file. Slots are filled with names, numbers and dates, in all the ways
people write them.
"""

import json
import random
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.world import DEV, TEST, World

PARAPHRASE: Final = "paraphrase"
NAMES: Final = frozenset(("person", "town", "thing"))
NUMBERS: Final = frozenset(("number", "ordinal", "year"))
MOMENTS: Final = frozenset(("date", "time", "weekday"))
BY_SLOT: Final[Mapping[str, frozenset[str]]] = {"renamed": NAMES, "renumbered": NUMBERS, "redated": MOMENTS}
EXCHANGED: Final = "exchanged"
BY_PHRASING: Final = ("negated", "compared", "asked", "topic")
LOOKALIKES: Final = (*BY_SLOT, EXCHANGED, *BY_PHRASING)
"""Kinds of look-alikes: another name, number or date; exchanged roles; another negation, direction, question word or
topic."""

POOLS: Final = (DEV, TEST)
_TRIES: Final = 50  # to draw a pair that is new

_MONTHS: Final = (
    "January February March April May June July August September October November December".split()
)
_DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ORDINALS: Final = "second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_NUMBERS: Final = "two three four five six seven eight nine ten eleven twelve".split()
Value = tuple[str, ...]
"""All spellings of one value."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A cached question and one that is asked.

    Attributes:
        kind: PARAPHRASE or one of LOOKALIKES; from a file, any.
        cached: the question whose answer is in the cache.
        asked: the new question.
        is_paraphrase: whether both ask for the same thing.
        family: the family that both come from; empty from a file.
    """

    kind: str
    cached: str
    asked: str
    is_paraphrase: bool
    family: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Questions about one topic.

    Attributes:
        name: of the family.
        slots: kind of each placeholder: person, town, thing, number, ordinal, year, date, time or weekday.
        alike: questions that ask for the same thing.
        unlike: by kind of difference, questions that ask for something else.
        exchange: two slots whose values may swap roles, or nothing.
    """

    name: str
    slots: Mapping[str, str]
    alike: Sequence[str]
    unlike: Mapping[str, Sequence[str]]
    exchange: str = ""

    @property
    def phrasings(self) -> tuple[str, ...]:
        """All questions, placeholders unfilled."""
        return (*self.alike, *(text for texts in self.unlike.values() for text in texts))


def read_pairs(path: Path) -> list[Pair]:
    """Read pairs from JSON lines: objects with the questions `a` (cached) and `b` (asked), `same`, and `kind`.

    Raises InvalidRequest that names the line, also for a file without pairs of either sort, for a kind with both, and for a
    pair that comes twice.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--pairs {path} cannot be read: {error}") from error
    pairs: list[Pair] = []
    seen: set[tuple[str, str]] = set()
    sorts: dict[str, bool] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        pair = _read_pair(line, f"{path} line {number}")
        if (pair.cached, pair.asked) in seen:
            raise InvalidRequest(f"{path} line {number}: this pair stands in the file before")
        if sorts.setdefault(pair.kind, pair.is_paraphrase) != pair.is_paraphrase:
            raise InvalidRequest(
                f"{path} line {number}: kind {pair.kind!r} has pairs that ask the same and pairs that do not"
            )
        seen.add((pair.cached, pair.asked))
        pairs.append(pair)
    if len(set(sorts.values())) < 2:
        raise InvalidRequest(f"{path} needs pairs with same true and pairs with same false")
    return pairs


def _read_pair(line: str, where: str) -> Pair:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: no JSON: {error}") from error
    wanted = {"a": str, "b": str, "same": bool, "kind": str}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), of) for name, of in wanted.items()):
        raise InvalidRequest(
            f"{where}: an object with a, b and kind (text) and same (true or false) is needed"
        )
    if not found["a"].strip() or not found["b"].strip():
        raise InvalidRequest(f"{where}: a question is empty")
    return Pair(found["kind"], found["a"], found["b"], found["same"])


def make_pairs(split: str, paraphrases: int, lookalikes: int, seed: int) -> list[Pair]:
    """Draw pairs of different questions; equal arguments give equal pairs.

    All kinds of look-alikes get the same number of pairs, and the families of a kind take turns. Raises InvalidRequest
    for a split without a pool.
    """
    rng = random.Random(f"{split} {seed}")
    drawn: set[frozenset[str]] = set()
    kinds = [PARAPHRASE] * paraphrases + [LOOKALIKES[n % len(LOOKALIKES)] for n in range(lookalikes)]
    turns = {kind: _turns(kind, split, rng) for kind in dict.fromkeys(kinds)}
    pairs = []
    for kind in kinds:
        for _ in range(_TRIES):
            family = next(turns[kind])
            pair = _pair(kind, family, World(rng, split))
            texts = frozenset((pair.cached, pair.asked))
            if len(texts) == 2 and texts not in drawn:
                break
        else:
            raise AssertionError(f"the pool of {split} has too few pairs of kind {kind}")
        drawn.add(texts)
        pairs.append(pair)
    return pairs


def _turns(kind: str, split: str, rng: random.Random) -> Iterator[Family]:
    usable = [family for family in families(split) if _has_pairs_of(family, kind)]
    while True:
        rng.shuffle(usable)
        yield from usable


def _has_pairs_of(family: Family, kind: str) -> bool:
    if kind == PARAPHRASE:
        return True
    if kind in BY_SLOT:
        return any(slot in BY_SLOT[kind] for slot in family.slots.values())
    if kind == EXCHANGED:
        return bool(family.exchange) or "reversed" in family.unlike
    return kind in family.unlike


def _pair(kind: str, family: Family, world: World) -> Pair:
    rng = world.rng
    values = {slot: draw_value(of, world) for slot, of in family.slots.items()}
    cached, other = rng.sample(list(family.alike), 2)
    if kind != PARAPHRASE and rng.random() < 0.5:
        other = cached  # the same words but one: the hardest kind
    changed = dict(values)
    if kind in BY_SLOT:
        slot = rng.choice([slot for slot, of in family.slots.items() if of in BY_SLOT[kind]])
        changed[slot] = other_value(family.slots[slot], values[slot], world)
    elif kind == EXCHANGED and family.exchange:
        one, two = tuple(family.exchange)
        changed[one], changed[two] = values[two], values[one]
    elif kind != PARAPHRASE:
        other = rng.choice(list(family.unlike["reversed" if kind == EXCHANGED else kind]))
    texts = _filled(cached, values, rng), _filled(other, changed, rng)
    return Pair(kind, *texts, kind == PARAPHRASE, family.name)


def _filled(phrasing: str, values: Mapping[str, Value], rng: random.Random) -> str:
    text = phrasing.format(**{slot: rng.choice(spellings) for slot, spellings in values.items()})
    return text[0].upper() + text[1:]


@cache
def families(split: str) -> tuple[Family, ...]:
    """Return the families of a split; raise InvalidRequest if it has none. Splits share no phrasing."""
    if split not in POOLS:
        raise InvalidRequest(
            f"there are no look-alikes for split {split!r}; choose one of {', '.join(POOLS)}"
        )
    text = (resources.files(__package__) / "data" / "questions" / f"{split}.toml").read_text("utf-8")
    found = tuple(Family(**fields) for fields in tomllib.loads(text)["family"])
    for family in found:
        for phrasing in family.phrasings:
            named = {name for _, name, _, _ in string.Formatter().parse(phrasing) if name is not None}
            assert named <= family.slots.keys(), (family.name, phrasing)
            # Changing a value changes the question only if the phrasing has every slot.
            assert phrasing not in family.alike or named == family.slots.keys(), (family.name, phrasing)
    return found


def draw_value(kind: str, world: World) -> Value:
    """Draw a value of a kind, a new one while its kind has unused values."""
    rng = world.rng
    if kind == "person":
        first = world.person()
        return (f"{first} {world.person()}",) if rng.random() < 0.4 else (first,)
    if kind == "town":
        return (world.town(),)
    if kind == "thing":
        return (world.thing(),)
    return _moment(kind, rng) if kind in MOMENTS else _number(kind, rng)


def other_value(kind: str, than: Value, world: World) -> Value:
    """Draw another value of the same kind; half of the full names keep the first name."""
    first, _, last = than[0].partition(" ")
    if kind == "person" and last and world.rng.random() < 0.5:
        return (f"{first} {world.person()}",)
    while (other := draw_value(kind, world)) == than:
        pass
    return other


def _number(kind: str, rng: random.Random) -> Value:
    if kind == "year":
        return (str(rng.randrange(1998, 2026)),)
    if kind == "ordinal":
        place = rng.randrange(len(_ORDINALS))
        return _ORDINALS[place], f"{place + 2}{'nd' if place == 0 else 'rd' if place == 1 else 'th'}"
    if rng.random() < 0.3:
        place = rng.randrange(len(_NUMBERS))
        return str(place + 2), _NUMBERS[place]
    return (str(rng.randrange(13, 9999)),)


def _moment(kind: str, rng: random.Random) -> Value:
    if kind == "weekday":
        return (rng.choice(_DAYS),)
    if kind == "date":
        month, day = rng.choice(_MONTHS), rng.randrange(4, 21)
        return f"{day} {month}", f"{month} {day}", f"{month} {day}th", f"the {day}th of {month}"
    hour, minute = rng.randrange(6, 22), rng.choice((0, 0, 15, 30, 45))
    half, twelve = ("am" if hour < 12 else "pm"), (hour - 1) % 12 + 1
    short = f"{twelve} {half}" if minute == 0 else f"{twelve}:{minute:02} {half}"
    return f"{hour}:{minute:02}", short, short.replace(f" {half}", f"{half}")
