"""A story far longer than its opening: people with what they treasure, who come back long after they were last seen."""

from collections.abc import Iterator

from kvweave_lab.eval.longtext.script import Script, Turn
from kvweave_lab.eval.tasks.twohop import COLLECTS
from kvweave_lab.eval.world import World

NAME = "story"
CAST, LARGEST_CAST = 8, 24
"""People at the beginning, and at most: every one has a treasure of their own, of which a split has few."""


def write(world: World) -> Script:
    """CAST people; every turn brings back who was away longest, and somebody new while there are treasures."""
    cast = [(world.person(), world.thing()) for _ in range(CAST)]
    return Script(tuple(_told(world, person, thing) for person, thing in cast), _turns(world, cast))


def _turns(world: World, cast: list[tuple[str, str]]) -> Iterator[Turn]:
    while True:
        person, thing = cast.pop(world.rng.randrange(CAST // 2))
        cast.append((person, thing))
        told: tuple[str, ...] = ()
        if len(cast) < LARGEST_CAST and world.rng.random() < 0.5:
            cast.append((world.person(), world.thing()))
            told = (_told(world, *cast[-1]),)
        lead, rest = world.phrase(COLLECTS).split("{v}")
        yield Turn(told, asks=False, lead=lead.format(p=person), reply=thing, value=thing, rest=rest)


def _told(world: World, person: str, thing: str) -> str:
    return world.phrase(COLLECTS).format(p=person, v=thing)
