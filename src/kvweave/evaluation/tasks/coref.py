"""A document cut between a name and the sentence that refers back to it: "He ordered the soup"."""

from typing import NamedTuple

from kvweave.evaluation.draft import AcrossCut, Draft, Together
from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases
from kvweave.evaluation.world import World

NAME = "coref"
CUT = 2
WHOLE = 1


class Reference(NamedTuple):
    """A sentence with a name, one that refers to it, and the question that needs both."""

    named: Phrases
    referring: Phrases
    asked: Phrases


GUEST = Reference(
    named={
        TRAIN: (
            "The next guest was {k}.",
            "Then they greeted {k}.",
            "At the door stood {k}.",
            "After that it was the turn of {k}.",
            "The last one to arrive was {k}.",
            "Everyone looked at {k}.",
        ),
        DEV: ("The first one to arrive was {k}.",),
        TEST: ("Then it was the turn of {k}.", "The last guest was {k}."),
        HIDDEN: ("At the door they greeted {k}.",),
    },
    referring={
        TRAIN: (
            "{s} ordered the {v}.",
            "{s} asked for the {v}.",
            "{s} chose the {v}.",
            "{s} wanted to have the {v}.",
            "{s} decided to order the {v}.",
        ),
        DEV: ("{s} decided to ask for the {v}.",),
        TEST: ("{s} wanted to order the {v}.", "{s} then chose the {v}."),
        HIDDEN: ("{s} then asked for the {v}.",),
    },
    asked={
        TRAIN: (
            "What did {k} order?",
            "What was ordered by {k}?",
            "What did {k} ask for?",
            "What was the choice of {k}?",
        ),
        DEV: ("What did {k} choose?",),
        TEST: ("Which thing did {k} order?", "What was chosen by {k}?"),
        HIDDEN: ("Which thing did {k} ask for?",),
    },
)

TOWN = Reference(
    named={
        TRAIN: (
            "The road then leads to {k}.",
            "The next stop is {k}.",
            "From there one reaches {k}.",
            "Not far away lies {k}.",
            "On the map one finds {k}.",
        ),
        DEV: ("The next place on the map is {k}.",),
        TEST: ("From there the road leads to {k}.", "The last stop is {k}."),
        HIDDEN: ("Not far from there lies {k}.",),
    },
    referring={
        TRAIN: (
            "The same place is famous for the {v}.",
            "This place is known for the {v}.",
            "It is famous for the {v}.",
            "The place is visited for the {v}.",
        ),
        DEV: ("The same place is visited for the {v}.",),
        TEST: ("This place is famous for the {v}.", "The same place is known for the {v}."),
        HIDDEN: ("It is known for the {v}.",),
    },
    asked={
        TRAIN: (
            "What is {k} famous for?",
            "What is {k} known for?",
            "For what do people visit {k}?",
            "What makes people visit {k}?",
        ),
        DEV: ("For what is {k} famous?",),
        TEST: ("For what is {k} known?", "What do people know {k} for?"),
        HIDDEN: ("What has made {k} famous?",),
    },
)


def write(world: World, *, cut: int = CUT, whole: int = WHOLE) -> Draft:
    """`cut` pairs with the end of a chunk between them and `whole` inside one; a cut one is asked for."""
    draft = Draft()
    for number in range(cut + whole):
        town = world.rng.random() < 0.4
        kind, name = (TOWN, world.town()) if town else (GUEST, world.person())
        value, pronoun = world.thing(), world.rng.choice(("He", "She"))
        first = world.phrase(kind.named).format(k=name)
        then = world.phrase(kind.referring).format(s=pronoun, v=value)
        is_cut = number < cut
        draft.pieces.append(AcrossCut(first, then) if is_cut else Together((first, then)))
        draft.ask(NAME if is_cut else "coref_whole", world.phrase(kind.asked).format(k=name), value)
    return draft
