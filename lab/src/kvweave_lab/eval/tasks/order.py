"""Which of two things came first, where only their places in the notes show it."""

from kvweave_lab.eval.documents import Draft, InOrder
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NAME = "order"
METRIC = "exact_match"
EVENTS = 3

HAPPENED: Phrases = {
    TRAIN: variants(
        "[Then|Soon|Next|After that] they [saw|found|reached|passed] the {v}.",
        "[After a while|Soon|Later] somebody [brought in|showed|mentioned] the {v}.",
        "[Now|Next|Soon] the {v} was [shown|mentioned|carried in].",
        "The {v} appeared.",
        "Next on the list was the {v}.",
        "They [went on|continued|began again] with the {v}.",
        "Everyone [turned to|looked at|talked about] the {v}.",
        "[Then|Now|Later] it was the turn of the {v}.",
        "[Then|Later|At some point] the {v} [came|was taken up|was discussed|was brought].",
        "[Now|Then] they [began with|spoke of|went over to] the {v}.",
    ),
    DEV: ("After a while they saw the {v}.",),
    TEST: ("Then the {v} was brought in.", "Now they went on with the {v}."),
    HIDDEN: ("Then the {v} appeared.",),
}

ASKED: Phrases = {
    TRAIN: variants(
        "Which came first, the {x} or the {y}?",
        "What was first, the {x} or the {y}?",
        "[Which|What] was [shown|mentioned|seen] first, the {x} or the {y}?",
        "[Tell me|Say] what came first, the {x} or the {y}.",
        "Which [is|comes] earlier, the {x} or the {y}?",
        "What [was earlier|came earlier|came up first|was up first], the {x} or the {y}?",
        "Which [of them ]came [up first|before the other], the {x} or the {y}?",
        "Did the {x} or the {y} come first?",
    ),
    DEV: ("Which appeared first, the {x} or the {y}?",),
    TEST: ("What came first, the {x} or the {y}?", "Which was first, the {x} or the {y}?"),
    HIDDEN: ("What appeared first, the {x} or the {y}?",),
}


def write(world: World, *, events: int = EVENTS) -> Draft:
    """Return `events` things in order, each in a chunk of its own; every question asks about two of them."""
    things = [world.thing() for _ in range(events)]
    draft = Draft([InOrder(tuple(world.phrase(HAPPENED).format(v=thing) for thing in things))])
    for _ in range(events):
        early, late = sorted(world.rng.sample(range(events), 2))
        x, y = (early, late) if world.rng.random() < 0.5 else (late, early)
        draft.ask(NAME, world.phrase(ASKED).format(x=things[x], y=things[y]), things[early])
    return draft
