"""A fact in one chunk names a person whose own fact is in another chunk."""

from collections.abc import Sequence
from typing import NamedTuple

from kvweave_lab.eval.documents import Draft, InOrder
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NAME = "twohop"
METRIC = "words_match_last"
PAIRS = 3


class Relation(NamedTuple):
    """A person's role for another person, and the phrases that state it."""

    role: str
    phrases: Phrases


RELATIONS = (
    Relation(
        "host",
        {
            TRAIN: variants(
                "{q} is staying with {p}.",
                "[Just now|This week|Since Monday|Again] {q} is staying with {p}.",
                "{q} is [a guest|the guest|the lodger|a visitor] of {p}.",
                "[This week|At present|It seems] the host of {q} is {p}.",
                "{q} found a bed at the home of [the host|a kind host], {p}.",
            ),
            DEV: ("This month {q} is staying with {p}.",),
            TEST: ("For now {q} is a guest of {p}.", "The host of {q} is {p}."),
            HIDDEN: ("This year {q} is the guest of {p}.",),
        },
    ),
    Relation(
        "teacher",
        {
            TRAIN: variants(
                "{q} takes lessons from {p}.",
                "[Since spring|Every week|Again] {q} takes lessons from {p}.",
                "The teacher of {q} is [called|named] {p}.",
                "{q} is [a pupil|the best pupil|an old pupil] of {p}.",
                "{q} [learns everything|learned a lot|learns to read] from {p}.",
                "[They say|I hear] the teacher of {q} is {p}.",
            ),
            DEV: ("This year {q} takes lessons from {p}.",),
            TEST: ("For now {q} is a pupil of {p}.", "The teacher of {q} is {p}."),
            HIDDEN: ("This week {q} learns from {p}.",),
        },
    ),
    Relation(
        "boss",
        {
            TRAIN: variants(
                "{q} works for {p}.",
                "[Since spring|As before|Again] {q} works for {p}.",
                "The boss of {q} is [called|named] {p}.",
                "{q} was [hired|trained|sent out] by {p}.",
                "{q} [reports|answers] to {p}.",
                "[They say|I hear] the boss of {q} is {p}.",
            ),
            DEV: ("This year {q} works for {p}.",),
            TEST: ("For now {q} reports to {p}.", "The boss of {q} is {p}."),
            HIDDEN: ("This month {q} was hired by {p}.",),
        },
    ),
)

COLLECTS: Phrases = {
    TRAIN: variants(
        "{p} keeps the {v} as a treasure.",
        "[I hear that|They say|Of course] {p} [keeps|guards|hides|has] the {v} as a treasure.",
        "{p} [guards|hides|has] the {v} as a treasure.",
        "[Everyone has seen|Nobody saw] {p} [with|without] the {v}.",
        "{p} never [travels|leaves|goes out] without the {v}.",
        "The treasure of {p} [is|was always|must be] the {v}.",
        "{p} likes to [talk about|show|carry] the {v}.",
    ),
    DEV: ("Everyone knows that {p} keeps the {v}.",),
    TEST: ("It is said that {p} keeps the {v}.", "Everyone knows that the treasure of {p} is the {v}."),
    HIDDEN: ("They say {p} never travels without the {v}.",),
}

ASKED: Phrases = {
    TRAIN: variants(
        "What is the treasure of the {r} of {q}?",
        "[Tell me|Look up|I want to know] the treasure of the {r} of {q}.",
        "Which treasure does the {r} of {q} [keep|have|guard]?",
        "What does the {r} of {q} [keep|guard|carry]?",
        "What treasure [has the {r} of {q}|does the {r} of {q} guard]?",
        "Which treasure is [kept|guarded|owned] by the {r} of {q}?",
    ),
    DEV: ("Name the treasure of the {r} of {q}.",),
    TEST: ("Which treasure belongs to the {r} of {q}?", "What treasure does the {r} of {q} keep?"),
    HIDDEN: ("Find the treasure of the {r} of {q}.",),
}


def write(world: World, *, pairs: int = PAIRS, relations: Sequence[Relation] = RELATIONS) -> Draft:
    """Return `pairs` pairs of people in one of the relations; the question names one and asks for the other's treasure.

    A full answer names the other person, and then the treasure.
    """
    relation = world.rng.choice(relations)
    draft = Draft()
    for _ in range(pairs):
        p, q, value = world.person(), world.person(), world.thing()
        link = world.phrase(relation.phrases).format(p=p, q=q)
        fact = world.phrase(COLLECTS).format(p=p, v=value)
        draft.belongs |= {link: (p, q), fact: (value, p)}
        draft.pieces.append(InOrder((fact, link) if world.rng.random() < 0.5 else (link, fact)))
        draft.ask(NAME, world.phrase(ASKED).format(r=relation.role, q=q), value, reply=f"{p}, {value}")
        draft.ask("twohop_fact", f"What is the treasure of {p}?", value)
    return draft
