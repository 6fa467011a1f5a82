"""Finds stored answers that contradict each other though their questions read the same, and settles which one stays.

Two questions read the same if the answer cache may give either one's answer to the other. Both are answered again; if the
answers still contradict each other, the one that the documents support better stays, for both questions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvweave.answer_cache.matching import similarity
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer
from kvweave.engine.answering.agreement import contradict, support
from kvweave.engine.answering.cached_answers import CachedAnswers
from kvweave.index.documents import version_of

Pair = tuple[CachedAnswer, CachedAnswer]


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
