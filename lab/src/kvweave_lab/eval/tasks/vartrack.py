"""A value passed along a chain of places, each link in a later chunk (after RULER's variable tracking).

RULER asks for every variable that has a value. Here the question names the end of the chain and asks for the value, so
that each link has to be followed. The chain's first place ends a chunk and its content starts the next one.
"""

from collections.abc import Sequence
from itertools import pairwise

from kvweave_lab.eval.documents import AcrossCut, Draft, InOrder, Together
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NAME = "vartrack"
METRIC = "words_match_last"
CHAINS = 3
LINKS = 2
PLACES = ("box", "drawer", "shelf", "cabinet", "cell", "slot")

NAMED: Phrases = {
    TRAIN: variants(
        "[Then|At last|After a while|Soon] they [opened|reached|turned to|came to] {p} {k}.",
        "Next in the row [is|was|comes] {p} {k}.",
        "The key [fits|belongs to|was for] {p} {k}.",
        "After that comes {p} {k}.",
        "Somebody [pointed at|checked|chose] {p} {k}.",
        "[Now|First|Next] [comes|came|follows] {p} {k}.",
        "[Later|Now|First] they [unlocked|came upon|looked into] {p} {k}.",
    ),
    DEV: ("After that they opened {p} {k}.",),
    TEST: ("Next they opened {p} {k}.", "Then comes {p} {k}."),
    HIDDEN: ("Somebody opened {p} {k}.",),
}

HOLDS: Phrases = {
    TRAIN: variants(
        "It [holds|contains|has|hides] the {v}.",
        "[Inside|There] [they found|they saw|was] the {v}.",
        "Inside there is the {v}.",
        "It was filled with the {v}.",
        "There they had put the {v}.",
        "In it lies the {v}.",
        "It [still|now|only] [contains|hides|has] the {v}.",
        "In it [they saw|was|they kept] the {v}.",
        "There [is|lies] the {v}.",
    ),
    DEV: ("Inside lies the {v}.",),
    TEST: ("In it there is the {v}.", "It still holds the {v}."),
    HIDDEN: ("Inside they had put the {v}.",),
}

COPIES: Phrases = {
    TRAIN: variants(
        "{p} {k} [matches|holds the same as|was filled like|is equal to|looks like|agrees with] {p} {j}.",
        "The content of {p} {k} is [that of|the same as that of] {p} {j}.",
        "Later {p} {k} [became a copy of|was made equal to|got the same as] {p} {j}.",
        "What {p} {k} holds is equal to {p} {j}.",
        "[Then|In the end|Today] {p} {k} [was filled the same as|was made like|is like|equals] {p} {j}.",
        "{p} {k} [is the same as|is a double of|copies|has what is in|was copied from] {p} {j}.",
    ),
    DEV: ("The content of {p} {k} is equal to {p} {j}.",),
    TEST: ("Later {p} {k} was filled like {p} {j}.", "{p} {k} is a copy of {p} {j}."),
    HIDDEN: ("{p} {k} became the same as {p} {j}.",),
}

ASKED: Phrases = {
    TRAIN: variants(
        "What is in {p} {k}?",
        "What does {p} {k} [hold|contain|hide]?",
        "[Tell me|Look up|I need] the content of {p} {k}.",
        "What [would you|can one|did they] find in {p} {k}?",
        "What [is kept|is hidden|was put] [in|inside] {p} {k}?",
        "What [fills|was] {p} {k} [now|filled with]?",
        "What are the contents of {p} {k}?",
        "Which content [has|is in] {p} {k}?",
    ),
    DEV: ("What lies in {p} {k}?",),
    TEST: ("What is inside {p} {k}?", "What is the content of {p} {k}?"),
    HIDDEN: ("What lies inside {p} {k}?",),
}


def write(
    world: World,
    *,
    chains: int = CHAINS,
    links: int = LINKS,
    cut: int = CHAINS,
    places: Sequence[str] = PLACES,
) -> Draft:
    """Return `chains` chains of `links` links, the first `cut` of which start across the end of a chunk.

    The question is about the last place of the first chain. A full answer names the way back and then the value.
    """
    place = world.rng.choice(places)
    draft = Draft()
    for number in range(chains):
        value, names = world.thing(), [world.name() for _ in range(links + 1)]
        first = _sentence(world.phrase(NAMED).format(p=place, k=names[0]))
        then = world.phrase(HOLDS).format(v=value)
        draft.pieces.append(AcrossCut(first, then) if number < cut else Together((first, then)))
        draft.refers[then] = names[0]
        copies = [
            _sentence(world.phrase(COPIES).format(p=place, k=name, j=before))
            for before, name in pairwise(names)
        ]
        if copies:
            draft.pieces.append(InOrder(tuple(copies)))
        for steps in range(links, -1, -1):
            text = world.phrase(ASKED).format(p=place, k=names[steps])
            reply = ", ".join([*reversed(names[:steps]), value])
            draft.ask(NAME if steps == links else "vartrack_step", text, value, reply=reply)
    return draft


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
