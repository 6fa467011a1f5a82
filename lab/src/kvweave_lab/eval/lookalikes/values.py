"""What fills the slots of a question: names, things, numbers, dates and times, each in the ways people write it."""

import random
from typing import Final

from kvweave_lab.eval.world import World

_MONTHS: Final = (
    "January February March April May June July August September October November December".split()
)
_DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ORDINALS: Final = "second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_NUMBERS: Final = "two three four five six seven eight nine ten eleven twelve".split()

NAMES: Final = frozenset(("person", "town", "thing"))
NUMBERS: Final = frozenset(("number", "ordinal", "year"))
MOMENTS: Final = frozenset(("date", "time", "weekday"))

Value = tuple[str, ...]
"""One value in all its spellings."""


def value(kind: str, world: World) -> Value:
    """A value of a kind that the world has not drawn yet, as far as its kind has enough."""
    rng = world.rng
    if kind == "person":
        first = world.person()
        return (f"{first} {world.person()}",) if rng.random() < 0.4 else (first,)
    if kind == "town":
        return (world.town(),)
    if kind == "thing":
        return (world.thing(),)
    return _moment(kind, rng) if kind in MOMENTS else _number(kind, rng)


def another(kind: str, than: Value, world: World) -> Value:
    """Another value of the same kind, half of the full names with the first name in common."""
    first, _, last = than[0].partition(" ")
    if kind == "person" and last and world.rng.random() < 0.5:
        return (f"{first} {world.person()}",)
    while (other := value(kind, world)) == than:
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
