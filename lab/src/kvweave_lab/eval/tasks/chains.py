"""Values behind several steps, each stated in another chunk.

`vartrack` passes a value along a chain of places, each link in a later chunk (after RULER's variable tracking). RULER
asks for every variable that has a value. Here the question names the end of the chain and asks for the value, so that
each link has to be followed. The chain's first place ends a chunk and its content starts the next one.

In `twohop` a fact in one chunk names a person whose own fact is in another chunk.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvweave_lab.eval.documents import AcrossCut, Draft, InOrder, Related, Task, Together
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

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

CONTENT_ASKED: Phrases = {
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


def write_vartrack(
    world: World,
    *,
    chains: int = 3,
    links: int = 2,
    cut: int = 3,
    places: Sequence[str] = PLACES,
    related: Related = AcrossCut,
) -> Draft:
    """Return `chains` chains of `links` links, the first `cut` of which start across the end of a chunk.

    The question is about the last place of the first chain. A full answer names the way back and then the value. `related`
    makes the pieces of starts across a cut.
    """
    place = world.rng.choice(places)
    draft = Draft()
    for number in range(chains):
        value, names = world.thing(), [world.name() for _ in range(links + 1)]
        first = capitalized(world.phrase(NAMED).format(p=place, k=names[0]))
        then = world.phrase(HOLDS).format(v=value)
        draft.pieces.append(related(first, then) if number < cut else Together((first, then)))
        draft.refers[then] = names[0]
        copies = [
            capitalized(world.phrase(COPIES).format(p=place, k=name, j=before))
            for before, name in pairwise(names)
        ]
        if copies:
            draft.pieces.append(InOrder(tuple(copies)))
        for steps in range(links, -1, -1):
            text = world.phrase(CONTENT_ASKED).format(p=place, k=names[steps])
            reply = ", ".join([*reversed(names[:steps]), value])
            draft.ask("vartrack" if steps == links else "vartrack_step", text, value, reply=reply)
    return draft


def capitalized(text: str) -> str:
    """Return a sentence with a capital at its start."""
    return text[0].upper() + text[1:]


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

TREASURE_ASKED: Phrases = {
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


def write_twohop(world: World, *, pairs: int = 3, relations: Sequence[Relation] = RELATIONS) -> Draft:
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
        text = world.phrase(TREASURE_ASKED).format(r=relation.role, q=q)
        draft.ask("twohop", text, value, reply=f"{p}, {value}")
        draft.ask("twohop_fact", f"What is the treasure of {p}?", value)
    return draft


TASKS = (
    Task("vartrack", "words_match_last", write_vartrack),
    Task("twohop", "words_match_last", write_twohop),
)
