"""The background jobs of a knowledge base, one after the other, chosen from what its database says.

There is no queue: each job changes what the next one is chosen by, so a killed process continues by asking again. Knows
neither when to work nor what it may cost.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final, Literal, TypeAlias

from kvweave.answer_cache.records import AnswerSettings, PendingQuestion, PendingReason, Vector
from kvweave.engine.background_budget import BackgroundBudget, Worth
from kvweave.engine.cached_answers import CachedAnswers
from kvweave.engine.calibration import Calibrator, Step
from kvweave.engine.components import Components, ListedCorpus
from kvweave.engine.contradictions import Contradictions, Pair
from kvweave.engine.kb_question import RequestContext, tokenized_prompt_for
from kvweave.engine.metadata import KBMetadata
from kvweave.engine.pipeline import answer
from kvweave.engine.question_prediction import QuestionPredictor
from kvweave.engine.settings import AskOptions, Settings
from kvweave.engine.state import KnowledgeBaseState
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.predict.filters import is_non_answer
from kvweave.predict.planning import PrecomputeExtent, Summarise, precompute_extent
from kvweave.predict.store import PredictionStore
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.match import missing_chunks
from kvweave.recipes.names import AUTO
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillRequest
from kvweave.results import Answer
from kvweave.types import TokenizedPrompt

JobKind: TypeAlias = Literal[
    "refresh",
    "answers",
    "contradiction",
    "calibration",
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


@dataclass(frozen=True, slots=True)
class Precomputer:
    """Computes answers and KV for questions, under the settings that they have in the answer cache.

    `context` loads the parts of a request when first called. `cached` records no questions, since no user asks.
    `waited_s` gives the seconds that this run has yielded to requests so far.
    """

    context: Callable[[], RequestContext]
    cached: CachedAnswers
    settings: Settings
    system: str
    waited_s: Callable[[], float] = lambda: 0.0

    def answer(self, question: str, settings: AnswerSettings) -> Answer:
        """Compute a question's answer again; store the answer and its KV as a request's would be."""
        before_s = self.waited_s()
        cached = replace(self.cached, waited_s=lambda: self.waited_s() - before_s)
        pieces = answer(self.context(), cached, question, self._vector(question), self._options(settings))
        while True:
            try:
                next(pieces)
            except StopIteration as finished:
                whole: Answer = finished.value.answer
                return whole

    def prefill(self, question: str, settings: AnswerSettings) -> None:
        """Store the KV that a question would be answered from and the store lacks."""
        recipe, prompt, missing = self._missing(question, settings)
        if missing:
            self._store_kv(recipe, prompt, missing)

    def restore(self, question: str, settings: AnswerSettings) -> bool:
        """Do the same if it fits without evicting anything; return whether it did (PerCache §4.3.3)."""
        recipe, prompt, missing = self._missing(question, settings)
        store = self.context().store
        if not missing or self._bytes(recipe, missing) > store.limit_bytes - store.used_bytes:
            return False
        self._store_kv(recipe, prompt, missing)
        return True

    def _options(self, settings: AnswerSettings) -> AskOptions:
        return self.settings.restore(settings, self.system, self.cached.documents.chunk_count())

    def _vector(self, question: str) -> Callable[[], Vector]:
        return cache(lambda: self.context().encoder.encode([question])[0])

    def _missing(self, question: str, settings: AnswerSettings) -> tuple[Recipe, TokenizedPrompt, list[Ids]]:
        """Return a question's recipe, its prompt, and the chunks in it that no stored KV fits."""
        context, options = self.context(), self._options(settings)
        prompt = tokenized_prompt_for(context, question, self._vector(question)(), options)
        recipe = options.recipe
        request = PrefillRequest(context.adapter, context.store, prompt, recipe.budget(None, None))
        return (
            recipe,
            prompt,
            [
                prompt.ids(prompt.spans[span])
                for span in missing_chunks(request, recipe.match, recipe.prepare)
            ],
        )

    def _bytes(self, recipe: Recipe, missing: Sequence[Ids]) -> int:
        """Return the bytes that storing chunks takes: what the recipe prepares of each, else what it remembers."""
        sizes = missing_bytes(
            self._prepare_context(), [(digest_tokens(ids), len(ids)) for ids in missing], recipe
        )
        adapter = self.context().adapter
        return sum(
            sizes.get(number, recipe.prepare.bytes(adapter, len(ids))) for number, ids in enumerate(missing)
        )

    def _prepare_context(self) -> PrepareContext:
        context = self.context()
        template = context.adapter.template
        corpus = ListedCorpus(context.documents, context.index, context.encoder, template)
        return PrepareContext(context.adapter, context.store, template.prefix_ids(self.system), corpus)

    def _store_kv(self, recipe: Recipe, prompt: TokenizedPrompt, missing: Sequence[Ids]) -> None:
        """Store what the recipe prepares of these chunks, and what it remembers of a request for the prompt."""
        context = self.context()
        prepare_chunks(self._prepare_context(), missing, recipe)
        if "chunk" in recipe.match.stored_kinds:
            remember(run(recipe, context.adapter, context.store, prompt))


class JobSource:
    """The jobs of one knowledge base, for one run.

    Args:
        precomputer: computes answers and KV for questions.
        predictor: returns what predicts questions; None where no answer is cached, so that none is worth predicting.
        predictions: what was predicted so far.
        store: the chunk KV.
        budget: records the store's limit.
        extent: how much of a predicted question is computed.
        yield_to_requests: called between parts of a job that run no model.
        calibrator: makes the verdict; None where it is not asked for.
    """

    def __init__(
        self,
        precomputer: Precomputer,
        predictor: Callable[[], QuestionPredictor | None],
        predictions: PredictionStore,
        store: ChunkStore,
        budget: BackgroundBudget,
        extent: PrecomputeExtent,
        yield_to_requests: Callable[[], None],
        calibrator: Calibrator | None = None,
    ) -> None:
        self._precomputer = precomputer
        self._cached = precomputer.cached
        self._new_predictor = predictor
        self._predictor = predictor()
        self._calibrator = calibrator
        self._predictions = predictions
        self._store = store
        self._budget = budget
        self._extent = extent
        self._yield_to_requests = yield_to_requests
        self._tried: set[Hashable] = set()
        self._to_restore: list[tuple[str, AnswerSettings]] | None = None
        self._contradictions = Contradictions(self._cached)
        self._to_settle: list[Pair] | None = None

    def next(self) -> Job | None:
        """Return the next job, None if nothing is left that this run has not tried.

        First what users wait for: the check of answers after documents came in (refresh), questions that lack a valid answer
        (answers), and answers that contradict each other (contradiction). Then what `auto` stands for, by which all others are
        computed (calibration). Then predicted questions: their KV and answer
        (population), or the answer where it was left out before (conversion, PerCache §4.3.3). Then new predictions (abstract,
        prediction). Last, evicted KV, if the store's limit was raised (restoration).
        """
        if not self._cached.documents.visible_versions():
            return None
        kinds = (
            self._refresh,
            self._answers,
            self._contradiction,
            self._calibration,
            self._population,
            self._conversion,
            self._prediction,
            self._restoration,
        )
        for kind in kinds:
            job = kind()
            if job is not None and job.key not in self._tried:
                self._tried.add(job.key)
                return replace(job, do=partial(self._measured, job.do))
        return None

    def _measured(self, do: Callable[[], object]) -> None:
        """Do a job, and record by how much the stored KV grew."""
        before = self._store.used_bytes
        try:
            do()
        finally:
            grown = self._store.used_bytes - before
            if grown > 0:
                self._budget.add_worth(Worth(kv_bytes=grown))

    def _refresh(self) -> Job | None:
        cached = self._cached
        if next(cached.unchecked(), None) is None:
            return None
        check = partial(cached.refresh, between=self._yield_to_requests)
        return Job("refresh", "checking answers", ("refresh", cached.answers.epoch), 1, check)

    def _answers(self) -> Job | None:
        return self._pending("answers", _ASKED, self._answer)

    def _contradiction(self) -> Job | None:
        if self._to_settle is None:
            self._to_settle = list(self._contradictions.pairs())
        if not self._to_settle:
            return None
        left, pair = len(self._to_settle), self._to_settle.pop(0)
        key = ("contradiction", *(each.id for each in pair))
        return Job("contradiction", pair[0].question, key, left, partial(self._settle, pair))

    def _settle(self, pair: Pair) -> None:
        """Put both questions of a pair to the model again; then one answer stays."""
        for each in pair:
            self._precomputer.answer(each.question, each.settings)
        self._contradictions.settle(pair)

    def _calibration(self) -> Job | None:
        step = None if self._calibrator is None else self._calibrator.next_if_due()
        if step is None:
            return None
        key = ("calibration", step.stage, step.done)
        return Job("calibration", step.about, key, step.total - step.done, partial(self._calibrate, step))

    def _calibrate(self, step: Step) -> None:
        step.do()
        self._predictor = self._new_predictor()  # questions are predicted for the recipe that answers them

    def close(self) -> None:
        """Delete what a calibration has stored for its trials."""
        if self._calibrator is not None:
            self._calibrator.close()

    def _population(self) -> Job | None:
        return self._pending("population", ("predicted",), self._populate)

    def _conversion(self) -> Job | None:
        return self._pending("conversion", ("prefilled",), self._answer) if self._extent == "answer" else None

    def _pending(
        self, kind: JobKind, reasons: tuple[PendingReason, ...], do: Callable[[PendingQuestion], None]
    ) -> Job | None:
        found = self._cached.answers.pending(most=len(self._tried) + 100, reasons=reasons)
        left = [
            one
            for one in found
            if one.settings.reranker == self._cached.reranker  # answers under another one wait for it
            and (kind, one.question, one.settings) not in self._tried
        ]
        if not left:
            return None
        first = left[0]
        return Job(
            kind, first.question, (kind, first.question, first.settings), len(left), partial(do, first)
        )

    def _populate(self, pending: PendingQuestion) -> None:
        if self._extent == "answer":
            self._answer(pending)
            return
        self._precomputer.prefill(pending.question, pending.settings)
        self._cached.answers.mark_prefilled(pending.question, pending.settings)

    def _answer(self, pending: PendingQuestion) -> None:
        answer = self._precomputer.answer(pending.question, pending.settings)
        answers = self._cached.answers
        if pending.reason in ("predicted", "prefilled") and is_non_answer(answer.text):
            with answers.transaction():
                if self._predictions.predicted.drop(pending.question, "unanswerable"):
                    answers.delete([pending.question])
        if not answer.text:  # the cache keeps no empty answer, however often it is computed
            answers.delete([pending.question], pending.settings)

    def _prediction(self) -> Job | None:
        predictor = self._predictor
        job = predictor.next_job() if predictor is not None else None
        if predictor is None or job is None:
            return None
        if isinstance(job, Summarise):
            about = f"key content of {len(job.chunks)} chunks"
            return Job("abstract", about, job, predictor.chunks_to_summarise(), partial(predictor.do, job))
        return Job("prediction", "questions to come", job, 1, partial(predictor.do, job))

    def _restoration(self) -> Job | None:
        limit, seen = self._store.limit_bytes, self._budget.fact(_LIMIT)
        if self._to_restore is None and seen is not None and limit > seen:
            self._to_restore = self._cached.answers.most_used()
        if not self._to_restore:
            if limit != seen:
                self._budget.record_fact(_LIMIT, limit)
            return None
        left = len(self._to_restore)
        question, settings = self._to_restore.pop(0)
        restore = partial(self._precomputer.restore, question, settings)
        return Job("restoration", question, ("restoration", question, settings), left, restore)


def job_source(
    state: KnowledgeBaseState,
    components: Components,
    cached: CachedAnswers,
    settings: Settings,
    metadata: KBMetadata,
    budget: BackgroundBudget,
    yield_to_requests: Callable[[], None],
    waited_s: Callable[[], float],
) -> JobSource:
    """Return the jobs of one run; no model is loaded before a job needs it. For `waited_s` see Precomputer."""
    context = cache(components.request_context)
    prediction = settings.config.prediction
    return JobSource(
        Precomputer(context, replace(cached, predictions=None), settings, metadata.system, waited_s),
        partial(_predictor, state, context, cached, settings, metadata),
        state.predictions,
        state.store,
        budget,
        precompute_extent(cached.threshold, prediction.decode_cutoff),
        yield_to_requests,
        Calibrator(state, components, settings) if settings.config.recipe == AUTO else None,
    )


def _predictor(
    state: KnowledgeBaseState,
    context: Callable[[], RequestContext],
    cached: CachedAnswers,
    settings: Settings,
    metadata: KBMetadata,
) -> QuestionPredictor | None:
    """Return what predicts questions as users will ask them by the settings; None if no answer is cached."""
    options = settings.resolve(metadata.system, state.documents.chunk_count())
    if options.answer_settings is None or not state.answers.limit_bytes:
        return None
    return QuestionPredictor(
        context,
        state.documents,
        state.answers,
        state.predictions,
        options.recipe,
        options.answer_settings,
        metadata.system,
        cached.threshold,
        settings.config.prediction.prediction_stride,
    )
