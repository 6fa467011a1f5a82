"""A conversation of many turns: each tells something new and asks for what an early turn told, once."""

from collections.abc import Iterator

from kvweave_lab.eval.attributes import ASKED, NUMBERS, STATED
from kvweave_lab.eval.longtext.script import Script, Turn
from kvweave_lab.eval.world import World

NAME = "dialogue"
WAITING = 6
"""Facts that are told and not asked for yet."""

Fact = tuple[str, str, str]
"""Attribute, owner, value."""


def write(world: World) -> Script:
    """WAITING facts; every turn adds one and asks for one of those that wait longest."""
    facts = [_fact(world) for _ in range(WAITING)]
    return Script(tuple(_told(world, fact) for fact in facts), _turns(world, facts))


def _turns(world: World, waiting: list[Fact]) -> Iterator[Turn]:
    while True:
        attribute, owner, value = waiting.pop(world.rng.randrange(WAITING // 2))
        waiting.append(_fact(world))
        asked = world.phrase(ASKED).format(a=attribute, k=owner)
        yield Turn((_told(world, waiting[-1]),), asks=True, lead=asked, reply=value, value=value)


def _fact(world: World) -> Fact:
    return world.rng.choice(NUMBERS), world.name(), world.number(world.rng.randint(3, 5))


def _told(world: World, fact: Fact) -> str:
    attribute, owner, value = fact
    return world.phrase(STATED).format(a=attribute, k=owner, v=value)
