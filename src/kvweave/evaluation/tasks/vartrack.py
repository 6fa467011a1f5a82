"""A value passed along a chain of places, each link in a later chunk (after RULER's variable tracking).

RULER asks for every variable that has a value; here the question names the end of the chain and wants the
value, so that each link has to be followed, not listed.
"""

from itertools import pairwise

from kvweave.evaluation.draft import Draft, InOrder
from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases
from kvweave.evaluation.world import World

NAME = "vartrack"
CHAINS = 3
LINKS = 2
PLACES = ("box", "drawer", "shelf", "cabinet", "cell", "slot")

HOLDS: Phrases = {
    TRAIN: (
        "{p} {k} holds the {v}.",
        "In {p} {k} there is the {v}.",
        "They put the {v} into {p} {k} first, so {p} {k} holds the {v}.",
        "At first {p} {k} was filled with the {v}.",
        "Inside {p} {k} lies the {v}.",
    ),
    DEV: ("At the start {p} {k} holds the {v}.",),
    TEST: ("At first {p} {k} holds the {v}.", "Inside {p} {k} there is the {v}."),
    HIDDEN: ("In {p} {k} lies the {v}.",),
}

COPIES: Phrases = {
    TRAIN: (
        "{p} {k} holds the same as {p} {j}.",
        "{p} {k} matches {p} {j}.",
        "{p} {k} was filled like {p} {j}.",
        "The content of {p} {k} is that of {p} {j}.",
        "Later {p} {k} became a copy of {p} {j}.",
        "What {p} {k} holds is equal to {p} {j}.",
    ),
    DEV: ("The content of {p} {k} is equal to {p} {j}.",),
    TEST: ("Later {p} {k} was filled like {p} {j}.", "{p} {k} is a copy of {p} {j}."),
    HIDDEN: ("{p} {k} became the same as {p} {j}.",),
}

ASKED: Phrases = {
    TRAIN: (
        "What is in {p} {k}?",
        "What does {p} {k} hold?",
        "Tell me the content of {p} {k}.",
        "What would you find in {p} {k}?",
    ),
    DEV: ("What lies in {p} {k}?",),
    TEST: ("What is inside {p} {k}?", "What is the content of {p} {k}?"),
    HIDDEN: ("What lies inside {p} {k}?",),
}


def write(world: World, *, chains: int = CHAINS, links: int = LINKS) -> Draft:
    """`chains` chains of `links` links; the question is about the last place of the first chain."""
    place = world.rng.choice(PLACES)
    draft = Draft()
    steps: list[tuple[str, str]] = []
    for _ in range(chains):
        value, names = world.thing(), [world.name() for _ in range(links + 1)]
        texts = [world.phrase(HOLDS).format(p=place, k=names[0], v=value)]
        texts += [world.phrase(COPIES).format(p=place, k=name, j=before) for before, name in pairwise(names)]
        draft.pieces.append(InOrder(tuple(_sentence(text) for text in texts)))
        draft.ask(NAME, world.phrase(ASKED).format(p=place, k=names[-1]), value)
        steps += [(name, value) for name in names[:-1]]
    for name, value in steps:
        draft.ask("vartrack_step", world.phrase(ASKED).format(p=place, k=name), value)
    return draft


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
