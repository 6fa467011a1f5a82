"""Two chunks disagree about a fact; the later one counts.

Half of the later statements say the fact anew, half only what to read instead of the old value.
"""

from kvweave.evaluation.attributes import ASKED, STATED, WORDS
from kvweave.evaluation.draft import Anywhere, Draft, InOrder
from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases
from kvweave.evaluation.world import World

NAME = "contradiction"
REVISED = 2
KEPT = 2

REPLACED: Phrases = {
    TRAIN: (
        "Where it says {o}, read {v} instead.",
        "The entry {o} was replaced with {v}.",
        "Note that {o} is out of date and became {v}.",
        "Since yesterday it is no longer {o} but {v}.",
        "The word {o} was crossed out, and beside it stands {v}.",
        "Somebody changed {o} to {v}.",
    ),
    DEV: ("Since yesterday {o} was replaced with {v}.",),
    TEST: ("Note that {o} was changed to {v}.", "It is no longer {o} but {v}."),
    HIDDEN: ("Note that {o} was replaced with {v}.",),
}


def write(world: World, *, revised: int = REVISED, kept: int = KEPT) -> Draft:
    """`revised` facts told twice with different values, `kept` facts told once; a revised one is asked for."""
    attribute = world.rng.choice(WORDS)
    draft = Draft()
    for number in range(revised + kept):
        name, value = world.name(), world.thing()
        told = world.phrase(STATED).format(a=attribute, k=name, v=value)
        if number >= revised:
            draft.pieces.append(Anywhere(told))
            draft.ask("contradiction_kept", world.phrase(ASKED).format(a=attribute, k=name), value)
            continue
        later = world.thing()
        if world.rng.random() < 0.5:
            then = world.phrase(STATED).format(a=attribute, k=name, v=later)
        else:
            then = world.phrase(REPLACED).format(o=value, v=later)
        draft.pieces.append(InOrder((told, then)))
        draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), later)
    return draft
