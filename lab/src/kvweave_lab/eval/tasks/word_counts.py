"""The most frequent words of a text: those of lists, and coded ones (RULER's common and frequent words)."""

from collections.abc import Sequence

from kvweave_lab.eval.documents import Anywhere, Draft, Task
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World

LISTED: Phrases = {
    TRAIN: ("The list says {w}.", "Listed here: {w}.", "One list has {w}."),
    DEV: ("Written on the list: {w}.",),
    TEST: ("The list has {w}.",),
    HIDDEN: ("One list says {w}.",),
}

COMMON_ASKED: Phrases = {
    TRAIN: (
        "Which {n} words are the most common in the lists?",
        "Name the {n} most common words of the lists.",
    ),
    DEV: ("Tell me the {n} most common words in the lists.",),
    TEST: ("What are the {n} most common words in the lists?",),
    HIDDEN: ("Find the {n} most common words of the lists.",),
}


def write_commonwords(world: World, *, common: int = 3, times: int = 6, rare: int = 12) -> Draft:
    """Return `common` words `times` times each and `rare` others once, shuffled over lines of five words."""
    often = [world.thing() for _ in range(common)]
    words = often * times + [world.thing() for _ in range(rare)]
    world.rng.shuffle(words)
    draft = _lines(world, LISTED, words, 5, ", ")
    draft.ask("commonwords", world.phrase(COMMON_ASKED).format(n=_NUMBERS[common]), *often)
    return draft


CODED: Phrases = {
    TRAIN: ("Coded text: {w}.", "The code reads {w}.", "In code: {w}."),
    DEV: ("The coded text reads {w}.",),
    TEST: ("The coded text: {w}.",),
    HIDDEN: ("In code it reads {w}.",),
}

FREQUENT_ASKED: Phrases = {
    TRAIN: ("Which three codes are the most frequent?", "Name the three most frequent codes."),
    DEV: ("Tell me the three most frequent codes.",),
    TEST: ("What are the three most frequent codes?",),
    HIDDEN: ("Find the three most frequent codes.",),
}


def write_frequentwords(world: World, *, codes: int = 12, most: int = 16) -> Draft:
    """Return `codes` coded words, the n-th most frequent `most` / n times; the question asks for the first three."""
    names = [world.person().lower() for _ in range(codes)]
    words = [name for rank, name in enumerate(names, 1) for _ in range(max(1, round(most / rank)))]
    world.rng.shuffle(words)
    draft = _lines(world, CODED, words, 6, " ")
    draft.ask("frequentwords", world.phrase(FREQUENT_ASKED), *names[:3])
    return draft


def _lines(world: World, phrases: Phrases, words: Sequence[str], per_line: int, separator: str) -> Draft:
    """Return a draft of the words in their order, `per_line` words to a sentence."""
    lines = [words[start : start + per_line] for start in range(0, len(words), per_line)]
    return Draft([Anywhere(world.phrase(phrases).format(w=separator.join(line))) for line in lines])


_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}

TASKS = (
    Task("commonwords", "words_match_all", write_commonwords),
    Task("frequentwords", "words_match_all", write_frequentwords),
)
