"""The kinds of long text as scripts: an opening, then turns without end, each ending in a value stated long before.

A script is plain sentences. `text.py` turns it into tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvweave_lab.eval.tasks import single, twohop, vartrack
from kvweave_lab.eval.world import World


@dataclass(frozen=True, slots=True)
class Turn:
    """New sentences, then one that ends in a value stated long before.

    Attributes:
        statements: sentences with new facts; natural text is put between them.
        asks: whether `lead` is a question; otherwise it is the beginning of a sentence.
        lead: the text before the reply.
        reply: the continuation that the model should give.
        value: the end of the reply, which is judged: one word that was stated before.
        rest: the end of the sentence after the reply.
    """

    statements: tuple[str, ...]
    asks: bool
    lead: str
    reply: str
    value: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """Sentences of the prompt, and an endless iterator of turns."""

    opening: tuple[str, ...]
    turns: Iterator[Turn]


# Reasoning: what a place holds follows from another place that was described many steps before.

CHAINS = 8
"""Chains that grow in turn; a step depends on one this many steps back."""


def write_reasoning(world: World) -> Script:
    """Write CHAINS places with their contents; each turn adds a place to one chain and concludes what it holds."""
    place = world.rng.choice(vartrack.PLACES)
    chains = [(world.name(), world.thing()) for _ in range(CHAINS)]
    opening = []
    for name, value in chains:
        opening.append(_capitalized(world.phrase(vartrack.NAMED).format(p=place, k=name)))
        opening.append(world.phrase(vartrack.HOLDS).format(v=value))
    return Script(tuple(opening), _reasoning_turns(world, place, chains))


def _reasoning_turns(world: World, place: str, chains: list[tuple[str, str]]) -> Iterator[Turn]:
    order = list(range(CHAINS))
    world.rng.shuffle(order)
    while True:
        for number in order:
            before, value = chains[number]
            name = world.name()
            chains[number] = name, value
            copied = _capitalized(world.phrase(vartrack.COPIES).format(p=place, k=name, j=before))
            asked = world.phrase(vartrack.ASKED).format(p=place, k=name)
            yield Turn((copied,), asks=True, lead=asked, reply=f"{before}, {value}", value=value)


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


# Dialogue: each turn states a new fact and asks for one from an early turn, once.

PENDING_FACTS = 6
"""Facts that were stated and not asked for yet."""

Fact = tuple[str, str, str]
"""Attribute, owner, value."""


def write_dialogue(world: World) -> Script:
    """Write PENDING_FACTS facts; each turn adds one and asks for one of the oldest pending ones."""
    facts = [_fact(world) for _ in range(PENDING_FACTS)]
    return Script(tuple(_fact_sentence(world, fact) for fact in facts), _dialogue_turns(world, facts))


def _dialogue_turns(world: World, pending: list[Fact]) -> Iterator[Turn]:
    while True:
        attribute, owner, value = pending.pop(world.rng.randrange(PENDING_FACTS // 2))
        pending.append(_fact(world))
        asked = world.phrase(single.ASKED).format(a=attribute, k=owner)
        stated = _fact_sentence(world, pending[-1])
        yield Turn((stated,), asks=True, lead=asked, reply=value, value=value)


def _fact(world: World) -> Fact:
    return world.rng.choice(single.NUMBERS), world.name(), world.number(world.rng.randint(3, 5))


def _fact_sentence(world: World, fact: Fact) -> str:
    attribute, owner, value = fact
    return world.phrase(single.STATED).format(a=attribute, k=owner, v=value)


# Story: characters with a treasure each, who return long after their last appearance.

CAST, LARGEST_CAST = 8, 24
"""Characters at the beginning, and at most. Each has a treasure of its own, and a split has few treasures."""


def write_story(world: World) -> Script:
    """Write CAST characters; each turn brings one of the longest absent back, and sometimes a new one."""
    cast = [(world.person(), world.thing()) for _ in range(CAST)]
    return Script(tuple(_treasure(world, person, thing) for person, thing in cast), _story_turns(world, cast))


def _story_turns(world: World, cast: list[tuple[str, str]]) -> Iterator[Turn]:
    while True:
        person, thing = cast.pop(world.rng.randrange(CAST // 2))
        cast.append((person, thing))
        introduced: tuple[str, ...] = ()
        if len(cast) < LARGEST_CAST and world.rng.random() < 0.5:
            cast.append((world.person(), world.thing()))
            introduced = (_treasure(world, *cast[-1]),)
        lead, rest = world.phrase(twohop.COLLECTS).split("{v}")
        yield Turn(introduced, asks=False, lead=lead.format(p=person), reply=thing, value=thing, rest=rest)


def _treasure(world: World, person: str, thing: str) -> str:
    return world.phrase(twohop.COLLECTS).format(p=person, v=thing)


LONG_TASKS: Mapping[str, Callable[[World], Script]] = MappingProxyType(
    {"reasoning": write_reasoning, "dialogue": write_dialogue, "story": write_story}
)
"""Every kind of long text by name, in table order."""
