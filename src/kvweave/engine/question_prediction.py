"""Predicting questions with the model at hand: runs the jobs that `predict/plan` names, and keeps what they bring.

What is predicted waits in the answer bank; computing it is another's work.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.english.reading import read
from kvweave.answer_cache.english.words import plain
from kvweave.answer_cache.matching import same_question
from kvweave.answer_cache.records import AnswerSettings, Vector
from kvweave.config import DEFAULT_NEW_TOKENS, GenerationConfig, within_context
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.pipeline import Parts
from kvweave.index.documents import DocumentTable
from kvweave.predict.filters import NEARLY_THE_SAME, is_about, nearly_same, questions_in
from kvweave.predict.planning import FromHistory, FromKnowledge, Job, SumUp, next_job
from kvweave.predict.prompts import PromptSet, wording_for
from kvweave.predict.store import ChunkName, Origin, Part, PredictionStore
from kvweave.recipes.recipe import Recipe, run
from kvweave.types import Prompt

BATCH_SHARE: Final = 4
"""A batch of chunks takes at most this fraction (1/4) of the model's context, and so does what stands of the abstract."""

_TEMPERATURE, _NUCLEUS = 0.8, 0.9  # of every draw but the first one from the same notes


def settings_of(draw: int) -> GenerationConfig:
    """How a reply is decoded: the first draw is greedy, others are drawn with their number as seed."""
    if draw == 0:
        return GenerationConfig()
    return GenerationConfig(temperature=_TEMPERATURE, top_p=_NUCLEUS, seed=draw)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A predicted question with its vector; `answerable` as far as what is found for it tells."""

    question: str
    vector: Vector
    answerable: bool


class QuestionPredictor:
    """Predicts questions as they would be asked under `circumstances`.

    Args:
        parts: gives what a request passes through, opened when first needed.
        shelf: the list of documents.
        answers: the bank.
        outlook: what predictions are made from, and written down in.
        recipe: by which the model reads chunks; as for requests, their stored KV is used.
        circumstances: the settings under which users are expected to ask.
        system: the instruction.
        threshold: τ.
        stride: how many questions are predicted at once (PerCache §4.1.2).
    """

    def __init__(
        self,
        parts: Callable[[], Parts],
        shelf: DocumentTable,
        answers: AnswerCache,
        predictions: PredictionStore,
        recipe: Recipe,
        circumstances: AnswerSettings,
        system: str,
        threshold: float,
        stride: int,
    ) -> None:
        self._parts = parts
        self._shelf = shelf
        self._answers = answers
        self._outlook = predictions
        self._recipe = recipe
        self._circumstances = circumstances
        self._system = system
        self._threshold = threshold
        self._stride = stride

    def next_job(self) -> Job | None:
        """What is due; loads no model where nothing is."""

        def batch_tokens() -> int:
            return self._wording.batch_tokens or self._most_tokens

        return next_job(self._outlook, self._listed(), batch_tokens, lambda: self._wording.earlier_questions)

    def lacking(self) -> int:
        """How many chunks the abstract lacks."""
        return len(self._outlook.abstract.lacking(self._listed()))

    def do(self, job: Job) -> None:
        """Run a job; nothing is written down before its end."""
        if isinstance(job, SumUp):
            self._sum_up(job)
        elif isinstance(job, FromKnowledge):
            self._predict_from_knowledge(job)
        else:
            self._predict_from_history(job)

    # The three jobs

    def _sum_up(self, job: SumUp) -> None:
        texts = self._parts().bank.texts([chunk.name for chunk in job.chunks])
        notes = [texts[chunk.name] for chunk in job.chunks if chunk.name in texts]
        told = self.said(notes, self._wording.sum_up(), draw=0) if notes else ""
        with self._answers.transaction():
            if {chunk.version for chunk in job.chunks} <= self._shelf.visible():
                self._outlook.abstract.put(job.chunks, told)

    def _predict_from_knowledge(self, job: FromKnowledge) -> None:
        parts = self._fitting([job.part, *job.others])
        request = self._wording.from_knowledge(self._per_reply)
        draws = range(job.round * self._draws, (job.round + 1) * self._draws)
        replies = [self.said([part.text for part in parts], request, draw) for draw in draws]
        self._keep(replies, "knowledge", parts, lambda: self._outlook.abstract.used(job.part.id))

    def _predict_from_history(self, job: FromHistory) -> None:
        request = self._wording.from_history(job.earlier, self._per_reply)
        replies: list[str] = []
        used: dict[Part, None] = {}
        for draw in range(self._draws):
            start = draw % len(job.parts)
            # A model that reads one part at a time gets another one for every draw.
            parts = self._fitting([*job.parts[start:], *job.parts[:start]])
            used |= dict.fromkeys(parts)
            replies.append(self.said([part.text for part in parts], request, draw))

        def seen() -> bool:
            self._outlook.history.seen(job.number)
            return True

        self._keep(replies, "history", list(used), seen)

    # Asking the model

    @property
    def _wording(self) -> PromptSet:
        return wording_for(self._parts().adapter.fingerprint.name)

    @property
    def _per_reply(self) -> int:
        return min(self._stride, self._wording.questions_per_reply)

    @property
    def _draws(self) -> int:
        return math.ceil(self._stride / self._wording.questions_per_reply)

    @property
    def _most_tokens(self) -> int:
        return self._parts().adapter.geometry.context_tokens // BATCH_SHARE

    def _listed(self) -> list[ChunkName]:
        rows = self._shelf.all_chunks()
        return [ChunkName(row.row_id, row.row_id.rpartition(":")[0], row.kv_tokens) for row in rows]

    def _fitting(self, parts: Sequence[Part]) -> list[Part]:
        """As many of the first parts as may stand in front of a request, one at least."""
        template, taken, tokens = self._parts().adapter.template, list(parts[:1]), 0
        for part in parts:
            tokens += len(template.chunk_ids(part.text))
            if part not in taken:
                if tokens > self._most_tokens:
                    break
                taken.append(part)
        return taken[: self._wording.parts_at_once]

    def said(self, notes: Sequence[str], request: str, draw: int) -> str:
        """The model's reply to a request about notes; whoever asks the same many times may keep what it says."""
        parts = self._parts()
        adapter = parts.adapter
        prompt = adapter.template.render(Prompt(request, tuple(notes), self._system))
        context = adapter.geometry.context_tokens
        most = min(within_context(None, DEFAULT_NEW_TOKENS, context), context - prompt.tokens)
        if most < 1:
            return ""
        result = run(self._recipe, adapter, parts.store, prompt)
        decoded = Decoded()
        for _ in generate(
            adapter, result.kv_cache, prompt.token_ids, result.logits, settings_of(draw), most, decoded
        ):
            pass
        return decoded.text.strip()

    # Keeping what is worth it

    def _keep(
        self, replies: Iterable[str], origin: Origin, parts: Sequence[Part], done: Callable[[], bool]
    ) -> None:
        """Write down what is new in some replies; `done`, in the same commit, says whether it still counts."""
        asked = [question for reply in replies for question in questions_in(reply, self._per_reply)]
        kept: list[Candidate] = []
        for question in map(plain, asked):
            candidate = self._screened(question, kept)
            if candidate is not None:
                kept.append(candidate)
        versions = frozenset(version for part in parts for version in part.versions)
        with self._answers.transaction():
            if not versions <= self._shelf.visible() or not done():
                return
            for each in kept[: self._stride]:
                if each.answerable:
                    self._outlook.ledger.put(each.question, origin, versions)
                    self._answers.expect(each.question, each.vector, self._circumstances)
                else:
                    self._outlook.ledger.put(each.question, origin, versions, dropped="unanswerable")

    def _screened(self, question: str, others: Sequence[Candidate]) -> Candidate | None:
        """A predicted question, unless it is known, nearly known, or depends on the day."""
        if self._outlook.ledger.knows(question) or read(question).bound_to_now:
            return None
        parts = self._parts()
        vector = parts.encoder.encode([question])[0]
        near = self._answers.near(vector, self._circumstances, min(self._threshold, NEARLY_THE_SAME))
        near += [(other.question, float(vector @ other.vector)) for other in others]
        if any(self._is_same(question, other, cosine) for other, cosine in near):
            return None
        found = parts.bank.search(question, vector, self._circumstances.top_k, self._shelf.visible())
        return Candidate(question, vector, is_about(question, [chunk.text for chunk in found]))

    def _is_same(self, question: str, other: str, cosine: float) -> bool:
        if question == other or nearly_same(question, other, cosine):
            return True
        return same_question(read(question), read(other), cosine, self._threshold)
