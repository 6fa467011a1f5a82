"""Finds stored answers that contradict each other though their questions are the same, and settles which one stays.

Two questions are the same if the answer cache may give either one's answer to the other for certain. A group holds all stored
answers whose questions are the same as one of its others, so that settling it leaves no contradiction with an answer outside.
Its questions are answered again; among answers that still contradict each other, the one that the documents support best stays,
for all of their questions. Questions that are only near may ask for something else: answers that differ are then no
contradiction, but a verdict (`near_misses.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvweave.answer_cache.matching import similarity
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer
from kvweave.answering.agreement import contradict, support
from kvweave.answering.cached_answers import CachedAnswers
from kvweave.database import FactTable
from kvweave.index.documents import version_of

Pair = tuple[CachedAnswer, CachedAnswer]
Group = tuple[CachedAnswer, ...]

_COMPARED: Final = "answers_compared_until"
"""The recorded time, in seconds since 1970, up to which new answers were compared with those to questions in other words."""


@dataclass(frozen=True, slots=True)
class Contradictions:
    """The contradictions among the answers of `cached`; `facts` records which were compared."""

    cached: CachedAnswers
    facts: FactTable

    def groups(self, between: Callable[[], None] = lambda: None) -> list[Group]:
        """Return the groups in which answers contradict each other; `between` is called before each answer that is looked at."""
        found: list[Group] = []
        known: set[int] = set()
        for pair in chain(self._of_one_key(), self._of_new_answers(between)):
            if known.isdisjoint(each.id for each in pair):
                found.append(self._group(pair, between))
                known.update(each.id for each in found[-1])
        return found

    def _group(self, pair: Pair, between: Callable[[], None]) -> Group:
        """Return a pair and all whose questions are the same as one of the group's, in the order in which they are found."""
        group = {each.id: each for each in pair}
        waiting = deque(pair)
        while waiting:
            between()
            for other in self._same(waiting.popleft()):
                if other.id not in group and not self.cached.are_words(other):
                    group[other.id] = other
                    waiting.append(other)
        return tuple(group.values())

    def _same(self, answer: CachedAnswer) -> list[CachedAnswer]:
        """Return the answers to the same question; what was taken for typing errors may still be words of the documents."""
        if answer.options.reranker != self.cached.reranker:
            return []
        return self.cached.answers.pairs.same(answer, self.cached.threshold)

    def _of_one_key(self) -> Iterator[Pair]:
        """Yield those whose questions have one key, the answer that is used more first."""
        answers, threshold = self.cached.answers, self.cached.threshold
        for one, other in answers.pairs.of_one_key():
            cosine = similarity(one.vector, other.vector)
            comparable = one.options.reranker == self.cached.reranker and contradict(one.text, other.text)
            if comparable and answers.matcher.same(one.question, other.question, cosine, threshold):
                yield one, other

    def _of_new_answers(self, between: Callable[[], None]) -> Iterator[Pair]:
        """Yield those of answers that were not looked at yet, the older one first.

        Pairs from the first contradiction on are checked again next time, because settling it recomputes both answers.
        """
        before = compared = self.facts.get(_COMPARED) or 0.0
        found = False
        for answer in self.cached.answers.pairs.new_answers(before):
            between()
            for other in self._same(answer):
                if contradict(answer.text, other.text) and not self.cached.are_words(other):
                    found = True
                    older, newer = sorted((answer, other), key=lambda each: each.made_at_s)
                    yield older, newer
            if not found:
                compared = answer.made_at_s
        if compared != before:
            self.facts.record(_COMPARED, compared)

    def settle(self, group: Group) -> None:
        """Let one answer stay for all questions of a group whose answers, made again, still contradict each other.

        Answers of the group that contradict no other one stay as they are.
        """
        answers = self.cached.answers
        with answers.transaction():
            stored = [answer for each in group if (answer := answers.get(each.id)) is not None]
            against = {one.id: sum(contradict(one.text, other.text) for other in stored) for one in stored}
            opposed = [each for each in stored if against[each.id]]
            if not opposed:
                return
            texts = [source.text for each in opposed for source in each.sources]
            stays = max(opposed, key=lambda each: (support(each.text, texts), -against[each.id]))
            versions = frozenset(map(version_of, stays.chunks))
            if not versions <= self.cached.documents.visible_versions():
                return
            origin = AnswerProvenance(versions, stays.chunks, stays.epoch)
            for each in opposed:
                if each is not stays:
                    answers.put(
                        *(each.question, each.vector, each.options),
                        *(stays.text, stays.sources, origin),
                        asked=False,
                    )
