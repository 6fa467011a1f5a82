"""Two chunks disagree about a fact; the later one counts.

Half of the later statements repeat the fact with another value. The others follow the fact at the start of the next
chunk and say only that it was wrong, and the new value.
"""

from kvweave_lab.eval.documents import AcrossCut, Anywhere, Draft, InOrder
from kvweave_lab.eval.tasks.single import ASKED, STATED, WORDS
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

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
    """Return `revised` facts stated twice with different values, and `kept` facts stated once.

    The question asks for a revised one. A full answer gives the old value, and then the new one.
    """
    attribute = world.rng.choice(WORDS)
    draft = Draft()
    for number in range(revised + kept):
        name, value = world.name(), world.thing()
        statement = world.phrase(STATED).format(a=attribute, k=name, v=value)
        draft.belongs[statement] = (value, name)
        if number >= revised:
            draft.pieces.append(Anywhere(statement))
            draft.ask("contradiction_kept", world.phrase(ASKED).format(a=attribute, k=name), value)
            continue
        later = world.thing()
        if world.rng.random() < 0.5:
            restated = world.phrase(STATED).format(a=attribute, k=name, v=later)
            draft.pieces.append(InOrder((statement, restated)))
            draft.belongs[restated] = (later, name)
        else:
            correction = world.phrase(CORRECTED).format(v=later)
            draft.pieces.append(AcrossCut(statement, correction))
            draft.refers[correction] = name
            draft.belongs[correction] = (later, name)
        draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), later, reply=f"{value}, {later}")
    return draft
