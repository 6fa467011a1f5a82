"""The background jobs of a knowledge base, one after the other, chosen from what its database says.

There is no queue: each job changes what the next one is chosen by, so a killed process continues by asking again. Knows
neither when to work nor what it may cost.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final, Literal, TypeAlias

from kvweave.answer_cache.evidence import is_non_answer, is_supported, repeats
from kvweave.answer_cache.predictions import DropReason
from kvweave.answer_cache.records import PendingQuestion, PendingReason
from kvweave.answering.ask import Asker
from kvweave.background.calibration import Calibrator, Step
from kvweave.background.planning import Summarise
from kvweave.background.precompute import Precomputer
from kvweave.background.prediction import QuestionPredictor
from kvweave.config import TRANSFORMERS
from kvweave.options import AskOptions
from kvweave.recipes.names import AUTO
from kvweave.results import Answer
from kvweave.state.active_requests import RequestGuard
from kvweave.state.background_budget import Worth
from kvweave.state.judge import JudgeFits
from kvweave.state.knowledge_base_state import KnowledgeBaseState
from kvweave.text import content_stems

JobKind: TypeAlias = Literal[
    "refresh",
    "answers",
    "calibration",
    "judging",
    "promotion",
    "population",
    "conversion",
    "abstract",
    "prediction",
    "restoration",
]
"""See `JobSource.next`."""

_ASKED: Final[tuple[PendingReason, ...]] = ("matched", "changed", "stale", "asked")
_LIMIT: Final = "kv_limit_bytes"


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do.

    `about` describes it to people, `key` identifies it, `left` is how many of its kind there are.
    """

    kind: JobKind
    about: str
    key: Hashable
    left: int
    do: Callable[[], object]


class JobSource:
    """The jobs of one knowledge base, for one run; they yield to requests by `guard`. Loads no model before a job needs it."""

    def __init__(self, state: KnowledgeBaseState, asker: Asker, guard: RequestGuard) -> None:
        self._state, self._cached, self._settings = state, asker.cached, asker.settings
        self._metadata, self._guard = asker.metadata, guard
        self._predictions, self._budget = state.predictions, state.background_budget
        self._components, self._context = asker.components, cache(asker.components.request_context)
        unrecorded = replace(asker.cached, predictions=None)  # no user asks
        self._precomputer = Precomputer(
            self._context, unrecorded, asker.settings, asker.metadata.system, lambda: guard.waited_s
        )
        config = asker.settings.config
        # Calibration compares logits, which vLLM does not give.
        auto = config.recipe == AUTO and config.model.engine == TRANSFORMERS
        self._calibrator = Calibrator(state, asker.components, asker.settings) if auto else None
        # Above the cutoff few questions are similar enough to a predicted one for its answer to be used.
        self._answers_ahead = asker.cached.threshold <= config.prediction.decode_cutoff
        self._fits = JudgeFits(config.home)
        self._judge = cache(lambda: judge.apart() if (judge := self._components.judge) is not None else None)
        self._tried: set[Hashable] = set()
        self._to_restore: list[tuple[str, AskOptions]] | None = None
        self._renew_predictor()

    def _renew_predictor(self) -> None:
        """Make the question predictor for the recipe that answers questions now; None if no answer is cached."""
        state, settings, system = self._state, self._settings, self._metadata.system
        self._predictor: QuestionPredictor | None = None
        options = settings.options(system)
        if not (options.cacheable and state.answers.limit_bytes):
            return
        self._predictor = QuestionPredictor(
            self._context,
            state.documents,
            state.answers,
            state.predictions,
            settings.recipe_of(options),
            options,
            system,
            self._cached.threshold,
            settings.config.prediction.prediction_stride,
        )

    def next(self) -> Job | None:
        """Return the next job, None if nothing is left that this run has not tried.

        First what users wait for: the check of answers after documents came in (refresh), and questions that lack a valid
        answer (answers); one that a stored question asks in other words gets that answer (promotion). Then the recipe that `auto` resolves to, by which all others are
        computed (calibration), and how well the model judges questions, once it could have judged one (judging). Then predicted questions: their KV and answer (population), or the answer where it was left out
        before (conversion, PerCache §4.3.3). Then new predictions (abstract, prediction). Last, evicted KV, if the store's limit
        was raised (restoration).
        """
        if not self._cached.documents.visible_versions():
            return None
        kinds = (
            self._refresh,
            self._answers,
            self._calibration,
            self._judging,
            self._population,
            self._conversion,
            self._prediction,
            self._restoration,
        )
        for kind in kinds:
            job = kind()
            if job is not None and job.key not in self._tried:
                self._tried.add(job.key)
                return replace(job, do=partial(self._measured, job))
        return None

    def _measured(self, job: Job) -> None:
        """Do a job, and record by how much the stored KV grew."""
        store = self._state.store
        before = store.used_bytes
        try:
            job.do()
        finally:
            grown = store.used_bytes - before
            if grown > 0:
                self._budget.add_worth(Worth(kv_bytes=grown))

    def _refresh(self) -> Job | None:
        cached = self._cached
        if next(cached.unchecked(), None) is None:
            return None
        check = partial(cached.refresh, between=self._guard.yield_to_requests)
        return Job("refresh", "checking answers", ("refresh", cached.answers.epoch), 1, check)

    def _answers(self) -> Job | None:
        return self._pending("answers", _ASKED, self._answer)

    def _calibration(self) -> Job | None:
        step = None if self._calibrator is None else self._calibrator.next_if_needed()
        if step is None:
            return None
        key = ("calibration", step.stage, step.done)
        return Job("calibration", step.about, key, step.total - step.done, partial(self._calibrate, step))

    def _calibrate(self, step: Step) -> None:
        step.do()
        self._renew_predictor()

    def _judging(self) -> Job | None:
        cached = self._cached
        if not cached.error_bound or not cached.answers.has_met_near:
            return None
        judge = self._components.judge
        if judge is None or judge.found is not None:
            return None
        fit = partial(judge.fit, between=self._guard.yield_to_requests)
        return Job("judging", "pairs of questions", ("judging",), 1, fit)

    def _promotion(self, pending: PendingQuestion) -> Job | None:
        """Return the job that puts a pending question and a near stored one to the judge, None if there is nothing to judge."""
        key = ("promotion", pending.question, pending.options)
        digest = self._metadata.get("model_digest")
        if key in self._tried or not self._cached.error_bound or digest is None:
            return None
        fit, vector = self._fits.find(digest), self._cached.answers.vector(pending.question, pending.options)
        near = (
            None if fit is None else self._cached.near(pending.question, lambda: vector, pending.options, fit)
        )
        wanted = self._predictions.predicted.wanted_answer(pending.question)
        if near is None or not _agrees(near.found.text, wanted):
            return None
        return Job("promotion", pending.question, key, 1, partial(self._promote, pending))

    def _promote(self, pending: PendingQuestion) -> None:
        judge = self._judge()
        if judge is not None:
            self._cached.promote(pending.question, pending.options, judge)

    def close(self) -> None:
        """Delete what a calibration has stored for its trials."""
        if self._calibrator is not None:
            self._calibrator.close()

    def _population(self) -> Job | None:
        return self._pending("population", ("predicted",), self._populate)

    def _conversion(self) -> Job | None:
        return self._pending("conversion", ("prefilled",), self._answer) if self._answers_ahead else None

    def _pending(
        self, kind: JobKind, reasons: tuple[PendingReason, ...], do: Callable[[PendingQuestion], None]
    ) -> Job | None:
        found = self._cached.answers.pending(len(self._tried) + 100, reasons)
        left = [
            one
            for one in found
            if one.options.reranker == self._cached.reranker  # answers under another one wait for it
            and (kind, one.question, one.options) not in self._tried
        ]
        if not left:
            return None
        first = left[0]
        key = (kind, first.question, first.options)
        return self._promotion(first) or Job(kind, first.question, key, len(left), partial(do, first))

    def _populate(self, pending: PendingQuestion) -> None:
        if self._answers_ahead:
            self._answer(pending)
            return
        self._precomputer.prefill(pending.question, pending.options)
        self._cached.answers.mark_prefilled(pending.question, pending.options)

    def _answer(self, pending: PendingQuestion) -> None:
        if pending.reason in ("predicted", "prefilled"):
            self._answer_predicted(pending)
            return

        # A question that was given another one's answer goes on getting it rather than an answer that goes round in circles.
        def accepts(answer: Answer) -> bool:
            return pending.reason != "matched" or not repeats(answer.text)

        answer = self._precomputer.answer(pending.question, pending.options, accepts)
        if not (answer.text and accepts(answer)):
            self._cached.answers.delete([pending.question], pending.options)  # nothing was stored for it

    def _answer_predicted(self, pending: PendingQuestion) -> None:
        """Store the answer if the passages hold it, else drop the question."""
        predicted, question = self._predictions.predicted, pending.question
        wanted = predicted.wanted_answer(question)
        answer = self._precomputer.answer(
            question, pending.options, lambda answer: _fault(question, answer, wanted) is None
        )
        dropped = _fault(question, answer, wanted)
        if dropped is not None:
            with self._cached.answers.transaction():
                if predicted.drop(question, dropped):
                    self._cached.answers.delete([question])

    def _prediction(self) -> Job | None:
        predictor = self._predictor
        job = predictor.next_job() if predictor is not None else None
        if predictor is None or job is None:
            return None
        if isinstance(job, Summarise):
            about = f"key content of {len(job.chunks)} chunks"
            left = predictor.chunks_to_summarise()
            return Job("abstract", about, job, left, partial(predictor.do, job))
        return Job("prediction", "questions to come", job, 1, partial(predictor.do, job))

    def _restoration(self) -> Job | None:
        facts = self._state.facts
        limit, seen = self._state.store.limit_bytes, facts.get(_LIMIT)
        if self._to_restore is None and seen is not None and limit > seen:
            self._to_restore = self._cached.answers.most_used()
        if not self._to_restore:
            if limit != seen:
                facts.record(_LIMIT, limit)
            return None
        left = len(self._to_restore)
        question, settings = self._to_restore.pop(0)
        restore = partial(self._precomputer.restore, question, settings)
        return Job("restoration", question, ("restoration", question, settings), left, restore)


def _fault(question: str, answer: Answer, wanted: str) -> DropReason | None:
    """Return the reason not to store the answer to a predicted question, or None if it may be stored.

    `wanted` is the answer that the question was made for, if it was: both ways must agree (Alberti et al. 2019, §2.3).
    """
    if is_non_answer(answer.text):
        return "no answer"
    if repeats(answer.text):
        return "repetition"
    supported = is_supported(question, answer.text, [source.text for source in answer.sources])
    return None if supported and _agrees(answer.text, wanted) else "unsupported"


def _agrees(answer: str, wanted: str) -> bool:
    """Return whether an answer has a content word of the one that its question was made for, if it was."""
    return not wanted or not content_stems([wanted]).isdisjoint(content_stems([answer]))
