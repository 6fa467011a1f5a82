"""A fact in one chunk names somebody whose own fact stands in another chunk."""

from typing import NamedTuple

from kvweave.evaluation.draft import Draft, InOrder
from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases
from kvweave.evaluation.world import World

NAME = "twohop"
PAIRS = 3


class Relation(NamedTuple):
    """Somebody who stands in a relation to somebody else."""

    role: str
    phrases: Phrases


RELATIONS = (
    Relation(
        "host",
        {
            TRAIN: (
                "{q} is staying with {p}.",
                "This week the host of {q} is {p}.",
                "{q} found a bed at the home of the host, {p}.",
                "{q} is a guest of {p}.",
            ),
            DEV: ("This month {q} is staying with {p}.",),
            TEST: ("For now {q} is a guest of {p}.", "The host of {q} is {p}."),
            HIDDEN: ("This year {q} is the guest of {p}.",),
        },
    ),
    Relation(
        "teacher",
        {
            TRAIN: (
                "{q} takes lessons from {p}.",
                "The teacher of {q} is called {p}.",
                "{q} is a pupil of {p}.",
                "{q} learns everything from {p}.",
            ),
            DEV: ("This year {q} takes lessons from {p}.",),
            TEST: ("For now {q} is a pupil of {p}.", "The teacher of {q} is {p}."),
            HIDDEN: ("This week {q} learns from {p}.",),
        },
    ),
    Relation(
        "boss",
        {
            TRAIN: (
                "{q} works for {p}.",
                "The boss of {q} is called {p}.",
                "{q} was hired by {p}.",
                "{q} reports to {p}.",
            ),
            DEV: ("This year {q} works for {p}.",),
            TEST: ("For now {q} reports to {p}.", "The boss of {q} is {p}."),
            HIDDEN: ("This month {q} was hired by {p}.",),
        },
    ),
)

COLLECTS: Phrases = {
    TRAIN: (
        "{p} likes to talk about the {v}.",
        "Everyone has seen {p} with the {v}.",
        "{p} never travels without the {v}.",
        "The treasure of {p} is the {v}.",
        "{p} keeps the {v} as a treasure.",
    ),
    DEV: ("Everyone knows that {p} keeps the {v}.",),
    TEST: ("It is said that {p} keeps the {v}.", "Everyone knows that the treasure of {p} is the {v}."),
    HIDDEN: ("They say {p} never travels without the {v}.",),
}

ASKED: Phrases = {
    TRAIN: (
        "What is the treasure of the {r} of {q}?",
        "Which treasure does the {r} of {q} keep?",
        "Tell me the treasure of the {r} of {q}.",
        "What does the {r} of {q} keep?",
    ),
    DEV: ("Name the treasure of the {r} of {q}.",),
    TEST: ("Which treasure belongs to the {r} of {q}?", "What treasure does the {r} of {q} keep?"),
    HIDDEN: ("Find the treasure of the {r} of {q}.",),
}


def write(world: World, *, pairs: int = PAIRS) -> Draft:
    """`pairs` pairs of people; the question names one and wants what the other one keeps."""
    relation = world.rng.choice(RELATIONS)
    draft = Draft()
    steps: list[tuple[str, str, str]] = []
    for _ in range(pairs):
        p, q, value = world.person(), world.person(), world.thing()
        link = world.phrase(relation.phrases).format(p=p, q=q)
        fact = world.phrase(COLLECTS).format(p=p, v=value)
        draft.pieces.append(InOrder((fact, link)))
        draft.ask(NAME, world.phrase(ASKED).format(r=relation.role, q=q), value)
        steps.append((p, q, value))
    for p, q, value in steps:
        draft.ask("twohop_link", f"Who is the {relation.role} of {q}?", p)
        draft.ask("twohop_fact", f"What is the treasure of {p}?", value)
    return draft
