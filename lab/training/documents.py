"""Training documents: several of the evaluation's tasks in one document, from the train split only."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvweave_lab.eval.documents import Draft, Question, sentences
from kvweave_lab.eval.layout import Layout
from kvweave_lab.eval.tasks import TASKS, chains, coref, needles, order
from kvweave_lab.eval.world import SPLITS, TRAIN, Haystack, Phrases, World, nouns, split_of
from training.phrases import CONTAINERS, people, relations, towns
from training.shape import Shape
from training.wording import RewordingWorld, VariedWorld
from training.world import TrainingWorld

TEXT = Path(__file__).parent / "text"

# Relative frequency of each task in documents; tasks of several steps are more frequent.
SHARES = {
    "single": 1.0,
    "multikey": 1.0,
    "multivalue": 1.6,
    "multiquery": 0.8,
    "vartrack": 1.8,
    "commonwords": 0.15,
    "frequentwords": 0.15,
    "twohop": 1.3,
    "coref": 2.2,
    "contradiction": 2.2,
    "order": 2.0,
}

SEPARATION = 0.35  # share of related sentence pairs at a cut that a haystack sentence separates

_STEPWISE = frozenset({"vartrack", "twohop", "coref", "contradiction"})

_ONCE_PER_DOCUMENT = frozenset(
    {"commonwords", "frequentwords"}
)  # their questions are about the whole document


class TrainingHaystack(Haystack):
    """The texts of `lab/training/text`, also as whole texts."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.texts = texts

    def sentence(self, rng: random.Random) -> str:
        """Return a random sentence."""
        return rng.choice(rng.choice(self.sentences()))

    def passage(self, rng: random.Random, tokens: int, count: Callable[[str], int]) -> list[str]:
        """Return consecutive sentences of one text with at most `tokens` tokens in all."""
        sentences = rng.choice(self.sentences())
        start = rng.randrange(len(sentences))
        chosen: list[str] = []
        for offset in range(len(sentences)):
            text = sentences[(start + offset) % len(sentences)]
            size = count(text)
            if size <= tokens:
                chosen.append(text)
                tokens -= size
            elif chosen or offset > 8:  # long sentences are skipped before the passage and end it
                break
        return chosen


@cache
def training_haystack() -> TrainingHaystack:
    """Return all training texts, in the order of their file names."""
    return TrainingHaystack([path.read_text("utf-8") for path in sorted(TEXT.glob("*.txt"))])


@cache
def training_words() -> tuple[str, ...]:
    """Return one-word values: words of the training texts that are no value of another split."""
    other = {word for split in SPLITS if split != TRAIN for word in nouns(split)}
    found = {
        word for text in training_haystack().texts for word in re.findall(r"(?<= )[a-z]{4,10}(?=[ ,.])", text)
    }
    return tuple(sorted(found - other))


@cache
def joined_words(vocabulary: tuple[str, ...]) -> tuple[str, ...]:
    """Return values made of a token that begins words and one or two tokens from inside words.

    Unlike words of the training texts, they contain the tokens that are values of other splits.
    """
    rng = random.Random(0)
    beginnings = [token[1:] for token in vocabulary if re.fullmatch("Ġ[a-z]{2,}", token)]
    ends = [token for token in vocabulary if re.fullmatch("[a-z]+", token)]
    made = {
        rng.choice(beginnings) + "".join(rng.choices(ends, k=rng.choice((1, 1, 2)))) for _ in range(30_000)
    }
    return tuple(sorted(word for word in made if split_of(word) == TRAIN))


@cache
def spliced_words() -> tuple[str, ...]:
    """Return invented words: the beginning of one training word with the end of another, usually several tokens."""
    rng, words = random.Random(0), training_words()
    other = {word for split in SPLITS for word in nouns(split)} | set(words)
    made = {
        rng.choice(words)[: rng.randint(2, 4)] + rng.choice(words)[-rng.randint(2, 4) :] for _ in range(6000)
    }
    return tuple(sorted(made - other))


class EasyWorld(TrainingWorld):
    """A world with everyday words as names and mostly the first phrasing, on which matching is learned first."""

    def __init__(self, rng: random.Random, words: Sequence[str]) -> None:
        super().__init__(rng, words)
        self._first_phrases = rng.random() < 0.6
        self._word_names = rng.random() < 0.7

    def person(self) -> str:
        """Return a name, usually a word."""
        return self.thing() if self._word_names else super().person()

    def town(self) -> str:
        """Return a name, usually a word."""
        return self.thing() if self._word_names else super().town()

    def phrase(self, phrases: Phrases) -> str:
        """Return a phrase, usually the first one."""
        return phrases[TRAIN][0] if self._first_phrases else super().phrase(phrases)


@dataclass(frozen=True, slots=True)
class Document:
    """Chunks, questions and the sentences that state facts; `refers` and `belongs` are those of `Draft`."""

    chunks: list[str]
    questions: list[Question]
    facts: list[str]
    refers: dict[str, str]
    belongs: dict[str, tuple[str, str]]


class Writer:
    """Writes training documents.

    Args:
        rng: the source of every choice.
        count: returns the number of tokens of a text.
        vocabulary: tokens of a byte-level tokenizer, which values are composed of.
    """

    def __init__(
        self, rng: random.Random, count: Callable[[str], int], vocabulary: Sequence[str] = ()
    ) -> None:
        self._rng = rng
        self._vocabulary = tuple(vocabulary)
        counted: dict[str, int] = {}
        haystack = {sentence for text in training_haystack().sentences() for sentence in text}

        def cached_count(text: str) -> int:
            if text not in haystack:
                return count(text)
            if text not in counted:
                counted[text] = count(text)
            return counted[text]

        self._count = cached_count

    def document(self, chunks: int, shape: Shape) -> Document:
        """Return a random document of `chunks` chunks, by the shares of a shape."""
        rng = self._rng
        size = rng.randint(*shape.chunk_tokens)
        budgets = [rng.randint(int(size * 0.75), size) for _ in range(chunks)]
        layout = Layout(rng, budgets, self._count, self._sentences_at_cut)
        world = self._world(shape)
        questions: list[Question] = []
        facts: list[str] = []
        refers: dict[str, str] = {}
        belongs: dict[str, tuple[str, str]] = {}
        written: set[str] = set()
        for name in self._task_names(chunks, size, shape):
            if name in _ONCE_PER_DOCUMENT and name in written:
                continue
            written.add(name)
            draft = self._draft(name, world, chunks)
            if layout.place_all(draft.pieces):
                questions += draft.questions
                refers |= draft.refers
                belongs |= draft.belongs
                facts += [sentence for piece in draft.pieces for sentence in sentences(piece)]
        haystack = training_haystack()
        natural = (haystack.passage(rng, tokens, self._count) for tokens in layout.room)
        texts = [self._with_line_ends(text) for text in layout.chunks(natural)]
        return Document(texts, questions, facts, refers, belongs)

    def _world(self, shape: Shape) -> TrainingWorld:
        world = self._varied_world(shape, self._words(shape))
        if shape.alike and self._rng.random() < shape.alike:
            world.use_similar_names()
        return world

    def _words(self, shape: Shape) -> Sequence[str]:
        rng = self._rng
        words = spliced_words() if shape.spliced and rng.random() < shape.spliced else training_words()
        if shape.joined and rng.random() < shape.joined:
            return joined_words(self._vocabulary)
        return words

    def _varied_world(self, shape: Shape, words: Sequence[str]) -> TrainingWorld:
        rng = self._rng
        if rng.random() < shape.easy:
            return EasyWorld(rng, words)
        if shape.varied and rng.random() < shape.varied:
            return VariedWorld(rng, words, training_words(), shape.garbled)
        if shape.reworded and rng.random() < shape.reworded:
            return RewordingWorld(rng, words, training_words())
        return TrainingWorld(rng, words)

    def _task_names(self, chunks: int, size: int, shape: Shape) -> list[str]:
        """Return the names of the tasks to write, with repetitions."""
        rng = self._rng
        names = list(TASKS)
        shares = [SHARES[name] * (shape.stepwise if name in _STEPWISE else 1) for name in names]
        if rng.random() < shape.sparse:
            return rng.choices(names, shares, k=rng.choice((1, 1, 2)))
        # dense: many questions for one context
        chosen = rng.choices(names, shares, k=max(2, round(chunks * size / rng.randint(40, 160))))
        if chunks <= 3 or rng.random() < 0.3:  # few kinds, many look-alikes
            chosen = rng.choices(rng.sample(chosen, min(len(chosen), 2)), k=len(chosen))
        return chosen

    def _with_line_ends(self, text: str) -> str:
        """Return a chunk with random line ends around it, as chunks of real documents have."""
        return self._rng.choice(("", "", "\n")) + text + self._rng.choice(("", "", "\n", "\n\n"))

    def _sentences_at_cut(self, first: str, then: str) -> tuple[list[str], list[str]]:
        """Return the sentences before and after a cut, sometimes with a haystack sentence in between."""
        if self._rng.random() >= SEPARATION:
            return [first], [then]
        before = self._rng.random() < 0.5
        between = training_haystack().sentence(self._rng)
        return ([first, between], [then]) if before else ([first], [between, then])

    def _draft(self, name: str, world: World, chunks: int) -> Draft:
        """Return a draft of a task, with sizes similar to the evaluation's."""
        rng = self._rng
        few, varied = chunks < 4, isinstance(world, VariedWorld)
        match name:
            case "multikey":
                return needles.write_multikey(
                    world, keys=rng.randint(2, 3 if few else 6), digits=rng.randint(3, 7)
                )
            case "multivalue":
                return needles.write_multivalue(
                    world, owners=rng.randint(1, 2 if few else 4), values=rng.choice((2, 2, 2, 3))
                )
            case "multiquery":
                return needles.write_multiquery(
                    world, keys=rng.randint(2, 3 if few else 5), digits=rng.randint(3, 7)
                )
            case "vartrack":
                return chains.write_vartrack(
                    world,
                    chains=rng.randint(2, 3 if few else 4),
                    links=rng.choice((0, 1, 1, 2) if few else (1, 2, 2, 3)),
                    cut=rng.randint(1, max(1, min(3, chunks - 1))),
                    places=CONTAINERS if varied else chains.PLACES,
                )
            case "twohop":
                return chains.write_twohop(
                    world,
                    pairs=rng.randint(2, 3 if few else 4),
                    relations=relations() if varied else chains.RELATIONS,
                )
            case "coref":
                return coref.write_coref(
                    world,
                    cut=rng.randint(1, max(1, min(4, chunks - 1))),
                    whole=rng.randint(0, 2),
                    people=people() if varied else (coref.GUEST,),
                    towns=towns() if varied else (coref.TOWN,),
                )
            case "contradiction":
                return order.write_contradiction(
                    world, revised=rng.randint(1, 2 if few else 3), kept=rng.randint(0, 3)
                )
            case "order":
                return order.write_order(world, events=rng.randint(2, 3 if few else 5))
        return TASKS[name](world)
