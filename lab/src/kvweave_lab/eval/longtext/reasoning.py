"""A long chain of reasoning: what a place holds follows from another place, found out many steps before.

Several chains grow in turn, so that what a step needs was said as many steps ago as there are chains.
"""

from collections.abc import Iterator

from kvweave_lab.eval.longtext.script import Script, Turn
from kvweave_lab.eval.tasks.vartrack import ASKED, COPIES, HOLDS, NAMED, PLACES
from kvweave_lab.eval.world import World

NAME = "reasoning"
CHAINS = 8


def write(world: World) -> Script:
    """CHAINS places with what they hold; every turn adds a place to one chain and concludes what is in it."""
    place = world.rng.choice(PLACES)
    chains = [(world.name(), world.thing()) for _ in range(CHAINS)]
    opening = []
    for name, value in chains:
        opening.append(_sentence(world.phrase(NAMED).format(p=place, k=name)))
        opening.append(world.phrase(HOLDS).format(v=value))
    return Script(tuple(opening), _turns(world, place, chains))


def _turns(world: World, place: str, chains: list[tuple[str, str]]) -> Iterator[Turn]:
    order = list(range(CHAINS))
    world.rng.shuffle(order)
    while True:
        for number in order:
            before, value = chains[number]
            name = world.name()
            chains[number] = name, value
            copied = _sentence(world.phrase(COPIES).format(p=place, k=name, j=before))
            asked = world.phrase(ASKED).format(p=place, k=name)
            yield Turn((copied,), asks=True, lead=asked, reply=f"{before}, {value}", value=value)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
