"""The most common words of long lists in which every other word is rare (RULER's common-words extraction)."""

from kvweave_lab.eval.documents import Anywhere, Draft
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World

NAME = "commonwords"
METRIC = "words_match_all"
COMMON = 3
TIMES = 6
RARE = 12
LINE = 5

LISTED: Phrases = {
    TRAIN: ("The list says {w}.", "Listed here: {w}.", "One list has {w}."),
    DEV: ("Written on the list: {w}.",),
    TEST: ("The list has {w}.",),
    HIDDEN: ("One list says {w}.",),
}

ASKED: Phrases = {
    TRAIN: (
        "Which {n} words are the most common in the lists?",
        "Name the {n} most common words of the lists.",
    ),
    DEV: ("Tell me the {n} most common words in the lists.",),
    TEST: ("What are the {n} most common words in the lists?",),
    HIDDEN: ("Find the {n} most common words of the lists.",),
}


def write(world: World, *, common: int = COMMON, times: int = TIMES, rare: int = RARE) -> Draft:
    """Return `common` words `times` times each and `rare` others once, shuffled over lines of five words."""
    often = [world.thing() for _ in range(common)]
    words = often * times + [world.thing() for _ in range(rare)]
    world.rng.shuffle(words)
    draft = Draft(
        [
            Anywhere(world.phrase(LISTED).format(w=", ".join(words[start : start + LINE])))
            for start in range(0, len(words), LINE)
        ]
    )
    draft.ask(NAME, world.phrase(ASKED).format(n=_NUMBERS[common]), *often)
    return draft


_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
