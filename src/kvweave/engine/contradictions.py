"""Finds stored answers that contradict each other though their questions read the same, and settles which one stays.

Two questions read the same if the answer cache may give either one's answer to the other. Both are answered again; if the
answers still contradict each other, the one that the documents support better stays, for both questions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.matching import similarity
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer
from kvweave.engine.cached_answers import CachedAnswers
from kvweave.index.documents import version_of
from kvweave.predict.filters import WORD, is_non_answer

Pair = tuple[CachedAnswer, CachedAnswer]

_FILLERS: Final = frozenset(
    "a an the is are was were it its that this in on at of to by and so be been".split()
)
_NEGATIONS: Final = frozenset("no not never none nobody nothing neither nor cannot without".split())
_SHORT_WORDS: Final = 4
"""Answers of at most so many content words contradict each other unless one contains the other."""
_LEAST_COMMON: Final = 0.3
"""Longer answers that share a smaller part of their content words contradict each other."""


def contradict(one: str, other: str) -> bool:
    """Return whether two answers to the same question differ in substance; symmetric.

    They do if a negation, a number or a name of one is not in the other and the other way round, or if they have hardly any
    content word in common. An answer that says the same with more words does not contradict the shorter one.
    """
    first, second = _content(one), _content(other)
    if first == second:
        return False
    if _negated(one) != _negated(other) or _yes_or_no(one) ^ _yes_or_no(other) == {"yes", "no"}:
        return True
    for decisive in (_numbers, _names):
        here, there = decisive(one), decisive(other)
        if here - there and there - here:
            return True
    if first <= second or second <= first:
        return False
    common = len(first & second) / len(first | second)
    return min(len(first), len(second)) <= _SHORT_WORDS or common < _LEAST_COMMON


def support(answer: str, texts: Sequence[str]) -> float:
    """Return the share of an answer's content words that texts contain, 0..1; -1 for one that says that there is none."""
    if is_non_answer(answer):
        return -1.0
    words = _content(answer)
    known = set().union(*map(_content, texts)) if texts else set()
    return len(words & known) / len(words) if words else 0.0


@dataclass(frozen=True, slots=True)
class Contradictions:
    """The contradictions among the answers of `cached`."""

    cached: CachedAnswers

    def pairs(self) -> Iterator[Pair]:
        """Yield the pairs of answers that contradict each other, the answer that is used more first."""
        answers, threshold = self.cached.answers, self.cached.threshold
        for one, other in answers.pairs_of_one_key():
            cosine = similarity(one.vector, other.vector)
            comparable = one.settings.reranker == self.cached.reranker and contradict(one.text, other.text)
            if comparable and answers.matcher.same(one.question, other.question, cosine, threshold):
                yield one, other

    def settle(self, pair: Pair) -> None:
        """Let one answer stay for both questions of a pair that was answered again, if they still contradict each other."""
        answers = self.cached.answers
        with answers.transaction():
            one, other = (answers.get(each.id) for each in pair)
            if one is None or other is None or not contradict(one.text, other.text):
                return
            texts = [source.text for source in (*one.sources, *other.sources)]
            stays, goes = (
                (one, other) if support(one.text, texts) >= support(other.text, texts) else (other, one)
            )
            versions = frozenset(map(version_of, stays.chunks))
            origin = AnswerProvenance(versions, stays.chunks, stays.epoch)
            if versions <= self.cached.documents.visible_versions():
                answers.put(
                    goes.question, goes.vector, goes.settings, stays.text, stays.sources, origin, asked=False
                )


def _words(text: str) -> list[str]:
    return [word.casefold() for word in WORD.findall(text)]


def _content(text: str) -> set[str]:
    return set(_words(text)) - _FILLERS


def _negated(text: str) -> bool:
    return not _NEGATIONS.isdisjoint(_words(text)) or "n't" in text.replace("’", "'")


def _yes_or_no(text: str) -> set[str]:
    return set(_words(text)[:1]) & {"yes", "no"}


def _numbers(text: str) -> set[str]:
    return {word for word in _words(text) if any(map(str.isdigit, word))}


def _names(text: str) -> set[str]:
    """Return the words with a capital letter inside a sentence, in lower case."""
    inside = [
        found for found in WORD.finditer(text) if found.start() and text[found.start() - 2] not in ".!?"
    ]
    return {found.group().casefold() for found in inside if found.group()[0].isupper()}
