"""Systems that give stored answers to the set's questions, from the same predictions: their rows, and which answers they give.

RAGCache + MeanCache, RAGCache + Sleep-time and PerCache (§4.2.1) give the stored answer whose question has the nearest vector, if
its cosine is at least τ. Nothing is screened and no reading has a veto. They differ from each other, and from plain reuse of
exact prefixes, only in which questions fill the cache. So what they compute is what the prefix arm computed, in its
seconds, and what they give costs one look-up, which is timed here. Which KV they find follows from the chunks of each prompt: a
prompt leaves its own, which is found after exactly the same chunks. PerCache's predicted prompts leave theirs too (§4.1.2).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvweave.embedding import Vectors
from kvweave.state.background_budget import Spent
from kvweave_lab.eval.metrics import f1, normalized
from kvweave_lab.eval.natural.questions import Question

SAME_F1: Final = 0.5
"""A given answer is wrong if it has a lower F1 with the one that the model computes for the question."""

_OWN_WORDINGS: Final = "paraphrase"
_FILLS: Final[dict[str, frozenset[str]]] = {
    "RAGCache": frozenset(),
    "RAGCache + MeanCache": frozenset({"asked"}),
    "RAGCache + Sleep-time": frozenset({"predicted"}),
    "PerCache as published": frozenset({"asked", "predicted"}),
}
_KEEPS_PREDICTED_KV: Final = "PerCache as published"

Chunks = Sequence[tuple[str, int]]
"""The chunks of a prompt in its order, each with its tokens."""


class Outcome(Protocol):
    """What an arm answered."""

    @property
    def text(self) -> str:
        """The answer."""
        ...

    @property
    def origin(self) -> str | None:
        """What the question whose stored answer was given was predicted from, or asked; None for a computed answer."""
        ...

    @property
    def ready(self) -> bool:
        """Whether no token of a chunk had to be computed from nothing."""
        ...

    @property
    def exact(self) -> float:
        """Share of the chunks' tokens whose KV was exact, 0..1."""
        ...

    @property
    def seconds(self) -> float:
        """Until the answer was there."""
        ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted question; `dropped` says why kvweave does not answer it, and `answer` is None then, else from `documents`."""

    question: str
    origin: str
    dropped: str | None
    answer: str | None
    documents: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A stored answer that a derived system gave: to the question of this id, from which other, and whether it was wrong."""

    system: str
    question: str
    served_by: str
    source: str
    cosine: float
    text: str
    wrong: bool


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """A system's row.

    Attributes:
        system: its name.
        served: share of questions that got the answer of a predicted one, and `served_asked` that of an earlier one.
        ready: share whose chunk KV was all there; served ones included.
        ready_tokens: mean share of the chunks' tokens whose KV was there; all of a question that was served or whose KV was all there.
        wrong: share of all questions that got a stored answer which is not the computed one.
        worse: share that got a stored answer without any of the set's answers, where the computed one has one.
        contains: share of answers that contain one of the set's.
        mean_s: mean seconds.
        idle_s, idle_flops: idle work.
    """

    system: str
    served: float
    served_asked: float
    ready: float
    ready_tokens: float
    wrong: float
    worse: float
    contains: float
    mean_s: float
    idle_s: float
    idle_flops: float


@dataclass(frozen=True, slots=True)
class _Given:
    """What a system gave to one question; `source` is asked, predicted, or empty for a computed answer."""

    text: str
    source: str
    computed: str
    ready: bool
    ready_tokens: float
    seconds: float


def contains(text: str, question: Question) -> bool:
    """Return whether an answer contains one of the set's answers to a question."""
    said = normalized(text)
    return any(normalized(each) in said for each in question.answers)


def is_same(served: str, computed: str) -> bool:
    """Return whether a served answer is the computed one: the same words but for articles and signs, or an F1 of SAME_F1."""
    return normalized(served) == normalized(computed) or f1(served, computed) >= SAME_F1


def executed(
    name: str,
    asked: Sequence[Question],
    outcomes: Mapping[str, Outcome],
    computed: Mapping[str, str],
    spent: Mapping[str, Spent],
) -> SystemFigures:
    """Return the row of an arm that was asked; `computed` are the answers without stored ones, by the question's id."""
    given = [
        _Given(
            outcomes[each.id].text,
            {None: "", "asked": "asked"}.get(outcomes[each.id].origin, "predicted"),
            computed[each.id],
            outcomes[each.id].ready,
            _ready_tokens(outcomes[each.id]),
            outcomes[each.id].seconds,
        )
        for each in asked
    ]
    return _row(name, asked, given, spent.values())


def _ready_tokens(outcome: Outcome) -> float:
    """Return the share of the chunks' tokens whose KV was there: stale KV counts where there is KV of all."""
    return 1.0 if outcome.ready else outcome.exact


class Prefixes:
    """The KV that prompts leave, which is found after exactly the same chunks."""

    def __init__(self, prompts: Iterable[Chunks] = ()) -> None:
        self._left: set[tuple[str, ...]] = set()
        for chunks in prompts:
            self.add(chunks)

    def add(self, chunks: Chunks) -> None:
        """Add the KV of a prompt."""
        texts = tuple(text for text, _ in chunks)
        self._left.update(texts[: at + 1] for at in range(len(texts)))

    def found(self, chunks: Chunks) -> float:
        """Return the share of a prompt's chunk tokens whose KV is there, 0..1."""
        texts = tuple(text for text, _ in chunks)
        first = next((at for at in range(len(texts)) if texts[: at + 1] not in self._left), len(texts))
        return sum(tokens for _, tokens in chunks[:first]) / max(1, sum(tokens for _, tokens in chunks))


class Derivation:
    """The systems that give the answer with the nearest vector.

    Args:
        asked: the set's questions, in order.
        prefix: what the prefix arm answered, by the question's id.
        computed: what kvweave computed for them, by the question's id.
        predictions: all predicted questions, dropped ones too.
        encode: returns vectors of length 1.
        threshold: τ.
        unscreened: returns the answer to a predicted question that was dropped, and so has none.
        prompt: returns what a question is answered from.
    """

    def __init__(
        self,
        asked: Sequence[Question],
        prefix: Mapping[str, Outcome],
        computed: Mapping[str, str],
        predictions: Sequence[Prediction],
        encode: Callable[[Sequence[str]], Vectors],
        threshold: float,
        unscreened: Callable[[str], str],
        prompt: Callable[[str], Chunks],
    ) -> None:
        self._prompt = prompt
        self._asked, self._prefix, self._computed = asked, prefix, computed
        self._encode, self._threshold, self._unscreened = encode, threshold, unscreened
        self._predicted = [each for each in predictions if each.origin != _OWN_WORDINGS]
        self._vectors = _encoded(encode, [each.question for each in self._predicted])

    def systems(self, spent: Mapping[str, Spent]) -> tuple[list[SystemFigures], list[Served]]:
        """Return every system's row and what it gave; `spent` is the idle work by kind, of which other wordings are ours."""
        rows: list[SystemFigures] = []
        served: list[Served] = []
        work = [each for kind, each in spent.items() if kind != _OWN_WORDINGS]
        for name, fills in _FILLS.items():
            given = self._given(name, fills, served)
            rows.append(_row(name, self._asked, given, work if "predicted" in fills else ()))
        return rows, served

    def _given(self, name: str, fills: frozenset[str], served: list[Served]) -> list[_Given]:
        given = []
        predicted = self._predicted if "predicted" in fills else []
        bank = [(each.question, "predicted") for each in predicted]
        vectors = list(self._vectors) if predicted else []
        ahead = predicted if name == _KEEPS_PREDICTED_KV else []
        left = Prefixes(self._prompt(each.question) for each in ahead)
        for question in self._asked:
            own, began = self._prefix[question.id], time.perf_counter()
            (vector,) = self._encode([question.text])
            cosines = np.array(vectors) @ vector if vectors else np.zeros(1)
            best = int(cosines.argmax())
            took_s = time.perf_counter() - began
            if cosines[best] < self._threshold:
                chunks = self._prompt(question.text) if ahead else ()
                share = left.found(chunks) if ahead else own.exact
                left.add(chunks)
                given.append(
                    _Given(own.text, "", own.text, share == 1 if ahead else own.ready, share, own.seconds)
                )
                if "asked" in fills:
                    bank.append((question.text, "asked"))
                    vectors.append(vector)
                continue
            other, source = bank[best]
            text = self._text(other, source)
            computed = own.text if source == "asked" else self._computed[question.id]
            given.append(_Given(text, source, computed, True, 1.0, took_s))
            wrong = not is_same(text, computed)
            served.append(Served(name, question.id, other, source, float(cosines[best]), text, wrong))
        return given

    def _text(self, other: str, source: str) -> str:
        """Return the stored answer to a question."""
        if source == "asked":
            return next(self._prefix[each.id].text for each in self._asked if each.text == other)
        found = next(each for each in self._predicted if each.question == other)
        return self._unscreened(other) if found.answer is None else found.answer


def _encoded(encode: Callable[[Sequence[str]], Vectors], texts: Sequence[str]) -> Vectors:
    return encode(texts) if texts else np.zeros((0, 1), dtype=np.float32)


def _row(
    name: str, asked: Sequence[Question], given: Sequence[_Given], spent: Iterable[Spent]
) -> SystemFigures:
    pairs, work = list(zip(asked, given, strict=True)), list(spent)
    stored = [(question, each) for question, each in pairs if each.source]
    wrong = [not is_same(each.text, each.computed) for _, each in stored]
    worse = [
        contains(each.computed, question) and not contains(each.text, question) for question, each in stored
    ]
    number = len(pairs)
    return SystemFigures(
        name,
        sum(each.source == "predicted" for each in given) / number,
        sum(each.source == "asked" for each in given) / number,
        sum(each.ready for each in given) / number,
        sum(each.ready_tokens for each in given) / number,
        sum(wrong) / number,
        sum(worse) / number,
        sum(contains(each.text, question) for question, each in pairs) / number,
        sum(each.seconds for each in given) / number,
        sum(each.seconds for each in work),
        sum(each.flops for each in work),
    )
