"""The most frequent coded words of a text whose word counts follow Zipf's law (RULER's frequent-words extraction)."""

from kvweave_lab.eval.documents import Anywhere, Draft
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World

NAME = "frequentwords"
METRIC = "words_match_all"
ASKED_FOR = 3
CODES = 12
MOST = 16
LINE = 6

CODED: Phrases = {
    TRAIN: ("Coded text: {w}.", "The code reads {w}.", "In code: {w}."),
    DEV: ("The coded text reads {w}.",),
    TEST: ("The coded text: {w}.",),
    HIDDEN: ("In code it reads {w}.",),
}

ASKED: Phrases = {
    TRAIN: ("Which three codes are the most frequent?", "Name the three most frequent codes."),
    DEV: ("Tell me the three most frequent codes.",),
    TEST: ("What are the three most frequent codes?",),
    HIDDEN: ("Find the three most frequent codes.",),
}


def write(world: World, *, codes: int = CODES, most: int = MOST) -> Draft:
    """Return `codes` coded words, the n-th most frequent `most` / n times; the question asks for the first three."""
    names = [world.person().lower() for _ in range(codes)]
    words = [name for rank, name in enumerate(names, 1) for _ in range(max(1, round(most / rank)))]
    world.rng.shuffle(words)
    draft = Draft(
        [
            Anywhere(world.phrase(CODED).format(w=" ".join(words[start : start + LINE])))
            for start in range(0, len(words), LINE)
        ]
    )
    draft.ask(NAME, world.phrase(ASKED), *names[:ASKED_FOR])
    return draft
