"""Several values of one name, in different places; all of them are wanted (RULER's multi-value needle)."""

from kvweave.evaluation.draft import Draft, InOrder
from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases
from kvweave.evaluation.world import World

NAME = "multivalue"
OWNERS = 3
VALUES = 2

OWNED: Phrases = {
    TRAIN: (
        "{k} owns a {v}.",
        "Among the things of {k} there is a {v}.",
        "It turned out that {k} owns the {v}.",
        "Later {k} also bought a {v}.",
        "Somebody gave {k} a {v}.",
        "In the house of {k} they found a {v}.",
        "The belongings of {k} include a {v}.",
        "One day {k} brought home a {v}.",
        "For many years {k} has had a {v}.",
    ),
    DEV: ("They say that {k} has a {v}.", "The things of {k} include a {v}."),
    TEST: ("It is known that {k} owns a {v}.", "In the end {k} bought a {v}.", "At home {k} has a {v}."),
    HIDDEN: ("People say that {k} owns a {v}.", "One day {k} bought the {v}."),
}

ASKED: Phrases = {
    TRAIN: (
        "Which things does {k} own?",
        "What belongs to {k}?",
        "Name all things that {k} owns.",
        "What are the belongings of {k}?",
        "Which things belong to {k}?",
    ),
    DEV: ("Tell me which things {k} owns.",),
    TEST: ("What does {k} own?", "Which things does {k} have?"),
    HIDDEN: ("Name the belongings of {k}.",),
}


def write(world: World, *, owners: int = OWNERS, values: int = VALUES) -> Draft:
    """`owners` people with `values` things each; the first one's are asked for, in order of appearance."""
    draft = Draft()
    for _ in range(owners):
        owner = world.person()
        things = [world.thing() for _ in range(values)]
        draft.pieces.append(InOrder(tuple(world.phrase(OWNED).format(k=owner, v=thing) for thing in things)))
        draft.ask(NAME, world.phrase(ASKED).format(k=owner), *things)
    return draft
