"""Two facts in one question (RULER's multi-query needle)."""

from kvweave_lab.eval.documents import Anywhere, Draft
from kvweave_lab.eval.tasks.single import NUMBERS, STATED
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NAME = "multiquery"
METRIC = "words_match_all"
KEYS = 4
DIGITS = 5

ASKED: Phrases = {
    TRAIN: variants(
        "What are the {a}s [of|belonging to|given to] {j} and {k}?",
        "Which {a}s do {j} and {k} [have|use]?",
        "[Tell me|Look up|I need] the {a}s of {j} and {k}.",
        "Find the {a}s that belong to {j} and {k}.",
        "What is the {a} of {j} and that of {k}?",
    ),
    DEV: ("Please give the {a}s of {j} and {k}.",),
    TEST: ("What are the {a}s for {j} and {k}?", "Do you know the {a}s of {j} and {k}?"),
    HIDDEN: ("Which {a}s belong to {j} and {k}?",),
}


def write(world: World, *, keys: int = KEYS, digits: int = DIGITS) -> Draft:
    """Return `keys` needles that differ in name and value; each question asks for two of them."""
    attribute = world.rng.choice(NUMBERS)
    facts = [(world.name(), world.number(digits)) for _ in range(keys)]
    draft = Draft()
    for name, value in facts:
        draft.pieces.append(Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value)))
    for _ in range(keys // 2):
        (j, v), (k, w) = world.rng.sample(facts, 2)
        text = world.phrase(ASKED).format(a=attribute, j=j, k=k)
        draft.ask(NAME, text, v, w, reply=f"{j} {v}, {k} {w}")
    return draft
