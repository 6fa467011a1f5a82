"""Two chunks disagree about a fact; the later one counts.

Half of the later statements say the fact anew; the others come right behind it, at the start of the next chunk,
and say no more than that this was wrong and what it is.
"""

from kvweave_lab.eval.attributes import ASKED, STATED, WORDS
from kvweave_lab.eval.draft import AcrossCut, Anywhere, Draft, InOrder
from kvweave_lab.eval.splits import DEV, HIDDEN, TEST, TRAIN, Phrases, variants
from kvweave_lab.eval.world import World

NAME = "contradiction"
METRIC = "words_match_last"
REVISED = 2
KEPT = 2

CORRECTED: Phrases = {
    TRAIN: variants(
        "[This|That] was wrong, it is {v} [now|instead].",
        "Correction: it [should be|must be|is] {v}.",
        "[Since yesterday|Since Monday|By now|Lately] it is {v} instead.",
        "[That is out of date|This is old], it became {v}.",
        "It was [later|soon|recently] changed to {v}.",
        "From [now|today] on please use {v}.",
        "[Somebody|The office] changed it to {v}.",
        "[No|Sorry|Wait], it [is|reads|must be] {v}.",
        "[This|That|The entry] [has changed|was replaced|is no longer valid]: it is {v} [now|today].",
        "[Correction|Update|Note]: [by now it is|it became|it reads|it was set to] {v}.",
        "[It was a mistake|They made a mistake|This is no longer true], it is {v}.",
    ),
    DEV: ("That was wrong, it should be {v}.",),
    TEST: ("Correction: it is {v} now.", "That is out of date, it was changed to {v}."),
    HIDDEN: ("This is out of date, it is {v} instead.",),
}


def write(world: World, *, revised: int = REVISED, kept: int = KEPT) -> Draft:
    """`revised` facts told twice with different values, `kept` facts told once; a revised one is asked for.

    A full answer says what it was, and then what it is.
    """
    attribute = world.rng.choice(WORDS)
    draft = Draft()
    for number in range(revised + kept):
        name, value = world.name(), world.thing()
        told = world.phrase(STATED).format(a=attribute, k=name, v=value)
        draft.belongs[told] = (value, name)
        if number >= revised:
            draft.pieces.append(Anywhere(told))
            draft.ask("contradiction_kept", world.phrase(ASKED).format(a=attribute, k=name), value)
            continue
        later = world.thing()
        if world.rng.random() < 0.5:
            again = world.phrase(STATED).format(a=attribute, k=name, v=later)
            draft.pieces.append(InOrder((told, again)))
            draft.belongs[again] = (later, name)
        else:
            correction = world.phrase(CORRECTED).format(v=later)
            draft.pieces.append(AcrossCut(told, correction))
            draft.refers[correction] = name
            draft.belongs[correction] = (later, name)
        draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), later, reply=f"{value}, {later}")
    return draft
