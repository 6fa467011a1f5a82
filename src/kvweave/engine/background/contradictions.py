"""Finds stored answers that contradict each other though their questions are the same, and settles which one stays.

Two questions are the same if the answer cache may give either one's answer to the other for certain. Both are answered again; if
the answers still contradict each other, the one that the documents support better stays, for both questions. Questions that
are only near may ask for something else: answers that differ are then no contradiction, but a verdict (`near_misses.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvweave.answer_cache.matching import similarity
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer
from kvweave.engine.answering.agreement import contradict, support
from kvweave.engine.answering.cached_answers import CachedAnswers
from kvweave.engine.background.budget import BackgroundBudget
from kvweave.index.documents import version_of

Pair = tuple[CachedAnswer, CachedAnswer]

_COMPARED: Final = "answers_compared_until"
"""The recorded time, in seconds since 1970, up to which new answers were compared with those to questions in other words."""


@dataclass(frozen=True, slots=True)
class Contradictions:
    """The contradictions among the answers of `cached`; `budget` records which were compared."""

    cached: CachedAnswers
    budget: BackgroundBudget

    def pairs(self, between: Callable[[], None] = lambda: None) -> Iterator[Pair]:
        """Yield the pairs of answers that contradict each other; `between` is called before each new answer is looked at."""
        seen = set()
        for pair in chain(self._of_one_key(), self._of_new_answers(between)):
            ids = frozenset(each.id for each in pair)
            if ids not in seen:
                seen.add(ids)
                yield pair

    def _of_one_key(self) -> Iterator[Pair]:
        """Yield those whose questions have one key, the answer that is used more first."""
        answers, threshold = self.cached.answers, self.cached.threshold
        for one, other in answers.pairs.of_one_key():
            cosine = similarity(one.vector, other.vector)
            comparable = one.settings.reranker == self.cached.reranker and contradict(one.text, other.text)
            if comparable and answers.matcher.same(one.question, other.question, cosine, threshold):
                yield one, other

    def _of_new_answers(self, between: Callable[[], None]) -> Iterator[Pair]:
        """Yield those of answers that were not looked at yet, the older one first.

        Those from the first contradiction on are looked at again next time: settling it makes both answers anew.
        """
        before = compared = self.budget.fact(_COMPARED) or 0.0
        found = False
        for answer, same in self.cached.answers.pairs.of_new_answers(before, self.cached.threshold):
            between()
            comparable = same if answer.settings.reranker == self.cached.reranker else []
            for other in comparable:
                if contradict(answer.text, other.text) and not self.cached.are_words(other):
                    found = True
                    older, newer = sorted((answer, other), key=lambda each: each.made_at_s)
                    yield older, newer
            if not found:
                compared = answer.made_at_s
        if compared != before:
            self.budget.record_fact(_COMPARED, compared)

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
