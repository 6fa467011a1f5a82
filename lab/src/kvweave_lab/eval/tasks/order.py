"""Facts whose order counts.

`contradiction`: two chunks disagree about a fact; the later one counts. Half of the later statements repeat the fact
with another value. The others follow the fact at the start of the next chunk and say only that it was wrong, and the
new value. `order`: which of two things came first, where only their places in the notes show it.
"""

from kvweave_lab.eval.documents import AcrossCut, Anywhere, Draft, InOrder, Related, Task
from kvweave_lab.eval.tasks.needles import ASKED, STATED, WORDS
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

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


def write_contradiction(
    world: World, *, revised: int = 2, kept: int = 2, corrected: float = 0.5, related: Related = AcrossCut
) -> Draft:
    """Return `revised` facts stated twice with different values, and `kept` facts stated once.

    The question asks for a revised one. A full answer gives the old value, and then the new one. A share `corrected` of the
    revisions refer back to the fact; `related` makes their pieces.
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
        if world.rng.random() < 1 - corrected:
            restated = world.phrase(STATED).format(a=attribute, k=name, v=later)
            draft.pieces.append(InOrder((statement, restated)))
            draft.belongs[restated] = (later, name)
        else:
            correction = world.phrase(CORRECTED).format(v=later)
            draft.pieces.append(related(statement, correction))
            draft.refers[correction] = name
            draft.belongs[correction] = (later, name)
        text = world.phrase(ASKED).format(a=attribute, k=name)
        draft.ask("contradiction", text, later, reply=f"{value}, {later}")
    return draft


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

FIRST_ASKED: Phrases = {
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


def write_order(world: World, *, events: int = 3) -> Draft:
    """Return `events` things in order, each in a chunk of its own; every question asks about two of them."""
    things = [world.thing() for _ in range(events)]
    draft = Draft([InOrder(tuple(world.phrase(HAPPENED).format(v=thing) for thing in things))])
    for _ in range(events):
        early, late = sorted(world.rng.sample(range(events), 2))
        x, y = (early, late) if world.rng.random() < 0.5 else (late, early)
        draft.ask("order", world.phrase(FIRST_ASKED).format(x=things[x], y=things[y]), things[early])
    return draft


TASKS = (
    Task("contradiction", "words_match_last", write_contradiction),
    Task("order", "exact_match", write_order),
)
