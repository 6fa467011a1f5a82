"""What there is to do at idle time, one step after the other, from what the knowledge base's database says.

Nothing is planned ahead: every step changes what the next one is chosen by, so that whoever is killed goes on by asking
again. Knows neither when to work nor what it may cost.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final, Literal, TypeAlias

from kvweave.answer_cache.records import AnswerSettings, PendingQuestion, Why
from kvweave.config import DEFAULT_NEW_TOKENS, GenerationConfig, PredictionConfig, within_context
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.background_budget import BackgroundBudget
from kvweave.engine.cached_answers import CachedAnswers
from kvweave.engine.components import Components, ListedCorpus
from kvweave.engine.pipeline import Parts, Question, answer, assembled
from kvweave.engine.question_prediction import QuestionPredictor
from kvweave.engine.settings import Choices, KBMetadata, Options
from kvweave.engine.state import KnowledgeBaseState
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.predict.filters import says_nothing
from kvweave.predict.planning import Extent, SumUp, extent
from kvweave.predict.store import PredictionStore
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.missing import absent_chunks
from kvweave.recipes.offline import lacking, prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillRequest
from kvweave.types import Answer, TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Precomputer:
    """Computes for questions under the circumstances that they have in the bank.

    `parts` gives what a request passes through, opened when first needed; `repeats` has no outlook, since no user asks;
    `system` is the knowledge base's instruction; `decoded_from` says how the KV is held for a budget that the
    circumstances name.
    """

    parts: Callable[[], Parts]
    repeats: CachedAnswers
    system: str
    decoded_from: Callable[[float | None], OffloadSettings | None]

    def answer(self, text: str, circumstances: AnswerSettings) -> Answer:
        """Answer a question anew; the answer is kept in the bank, its KV in the store, as a request's would be."""
        pieces = answer(self.parts(), self.repeats, self._question(text, circumstances))
        while True:
            try:
                next(pieces)
            except StopIteration as finished:
                whole: Answer = finished.value.answer
                return whole

    def prefill(self, text: str, circumstances: AnswerSettings) -> None:
        """Store the KV that a question would be answered from, as far as it is not there."""
        question = self._question(text, circumstances)
        prompt = assembled(self.parts(), question)
        absent = self._absent(question.recipe, prompt)
        if absent:
            self._store_kv(question.recipe, prompt, absent)

    def restore(self, text: str, circumstances: AnswerSettings) -> bool:
        """The same if it fits without evicting anything; whether anything was computed (PerCache §4.3.3)."""
        question = self._question(text, circumstances)
        prompt = assembled(self.parts(), question)
        absent = self._absent(question.recipe, prompt)
        store = self.parts().store
        if not absent or self._room(question.recipe, absent) > store.limit_bytes - store.used_bytes:
            return False
        self._store_kv(question.recipe, prompt, absent)
        return True

    def _question(self, text: str, circumstances: AnswerSettings) -> Question:
        parts = self.parts()
        return Question(
            text=text,
            vector=cache(lambda: parts.encoder.encode([text])[0]),
            circumstances=circumstances,
            recipe=recipe_named(circumstances.recipe, None, circumstances.auxiliary),
            ratio=circumstances.ratio,
            coverage=circumstances.coverage,
            top_k=circumstances.top_k,
            system=self.system,
            generation=GenerationConfig(max_new_tokens=circumstances.max_new_tokens),
            max_new_tokens=within_context(
                circumstances.max_new_tokens, DEFAULT_NEW_TOKENS, parts.adapter.geometry.context_tokens
            ),
            drop_chunks=circumstances.drop_chunks,
            kv=self.decoded_from(circumstances.kv_budget),
        )

    def _absent(self, recipe: Recipe, prompt: TokenizedPrompt) -> list[Ids]:
        """The chunks of the prompt that no stored KV can stand for."""
        parts = self.parts()
        request = PrefillRequest(parts.adapter, parts.store, prompt, recipe.budget(None, None))
        return [prompt.ids(prompt.spans[number]) for number in absent_chunks(recipe, request)]

    def _room(self, recipe: Recipe, absent: Sequence[Ids]) -> int:
        """Bytes that storing them takes: what the recipe prepares of a chunk, else what it remembers."""
        takes = lacking(self._shop(), [(digest_tokens(ids), len(ids)) for ids in absent], recipe)
        adapter = self.parts().adapter
        return sum(
            takes.get(place, recipe.prepare.bytes(adapter, len(ids))) for place, ids in enumerate(absent)
        )

    def _shop(self) -> PrepareContext:
        parts = self.parts()
        template = parts.adapter.template
        corpus = ListedCorpus(parts.shelf, parts.bank, parts.encoder, template)
        return PrepareContext(parts.adapter, parts.store, template.prefix_ids(self.system), corpus)

    def _store_kv(self, recipe: Recipe, prompt: TokenizedPrompt, absent: Sequence[Ids]) -> None:
        """What the recipe prepares of chunks of a prompt, and what it remembers of a request."""
        parts = self.parts()
        prepare_chunks(self._shop(), absent, recipe)
        if "chunk" in recipe.match.remembers:
            remember(run(recipe, parts.adapter, parts.store, prompt))


Kind: TypeAlias = Literal[
    "refresh", "answers", "population", "conversion", "abstract", "prediction", "restoration"
]
"""See `JobSource.next`."""

_USERS: Final[tuple[Why, ...]] = ("matched", "changed", "stale")
_LIMIT: Final = "kv_limit_bytes"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: `about` tells people what, `key` tells it from others, `left` are how many of the kind there are."""

    kind: Kind
    about: str
    key: Hashable
    left: int
    do: Callable[[], None]


class JobSource:
    """The work of one knowledge base, for one run.

    Args:
        ahead: what computes for questions.
        foresight: what predicts them; None where nothing is to be predicted, since no answer is kept.
        outlook: what was predicted.
        store: of the chunk KV.
        record: where its limit is noted.
        extent: how much of predicted questions is computed.
        breathe: called between parts of a step that run no model, so that others are let through.
    """

    def __init__(
        self,
        ahead: Precomputer,
        foresight: QuestionPredictor | None,
        predictions: PredictionStore,
        store: ChunkStore,
        record: BackgroundBudget,
        extent: Extent,
        breathe: Callable[[], None],
    ) -> None:
        self._ahead = ahead
        self._foresight = foresight
        self._outlook = predictions
        self._store = store
        self._record = record
        self._extent = extent
        self._breathe = breathe
        self._tried: set[Hashable] = set()
        self._to_restore: list[tuple[str, AnswerSettings]] | None = None

    def next(self) -> Step | None:
        """The next step, None if nothing is left that was not tried in this run.

        First what users wait for: answers that newer documents have overtaken (refresh), and questions without a
        true answer (answers). Then what was predicted: its KV and answer (population), or the answer where that was
        left out before (conversion, PerCache §4.3.3); then new predictions (abstract, prediction); last, KV that was
        evicted, where the store's limit has risen (restoration).
        """
        if not self._ahead.repeats.shelf.visible():
            return None
        plans = (
            self._refresh,
            self._answers,
            self._population,
            self._conversion,
            self._prediction,
            self._restoration,
        )
        for plan in plans:
            step = plan()
            if step is not None and step.key not in self._tried:
                self._tried.add(step.key)
                return step
        return None

    def _refresh(self) -> Step | None:
        repeats = self._ahead.repeats
        if next(repeats.answers.unseen(), None) is None:
            return None
        key = ("refresh", repeats.answers.epoch)
        return Step("refresh", "looking at answers", key, 1, lambda: _no_result(self._look()))

    def _look(self) -> int:
        return self._ahead.repeats.refresh(between=self._breathe)

    def _answers(self) -> Step | None:
        return self._waiting("answers", _USERS, self._answer)

    def _population(self) -> Step | None:
        return self._waiting("population", ("predicted",), self._populate)

    def _conversion(self) -> Step | None:
        return self._waiting("conversion", ("prefilled",), self._answer) if self._extent == "answer" else None

    def _waiting(
        self, kind: Kind, whys: tuple[Why, ...], do: Callable[[PendingQuestion], None]
    ) -> Step | None:
        found = self._ahead.repeats.answers.waiting(most=len(self._tried) + 100, whys=whys)
        left = [one for one in found if (kind, one.question, one.circumstances) not in self._tried]
        if not left:
            return None
        first = left[0]
        key = (kind, first.question, first.circumstances)
        return Step(kind, first.question, key, len(left), partial(do, first))

    def _populate(self, waiting: PendingQuestion) -> None:
        if self._extent == "answer":
            self._answer(waiting)
            return
        self._ahead.prefill(waiting.question, waiting.circumstances)
        self._ahead.repeats.answers.prefilled(waiting.question, waiting.circumstances)

    def _answer(self, waiting: PendingQuestion) -> None:
        answer = self._ahead.answer(waiting.question, waiting.circumstances)
        answers = self._ahead.repeats.answers
        if waiting.why in ("predicted", "prefilled") and says_nothing(answer.text):
            with answers.transaction():
                if self._outlook.ledger.drop(waiting.question, "unanswerable"):
                    answers.forget([waiting.question])
        if not answer.text:  # no answer that the bank would keep, however often it is computed
            answers.forget([waiting.question], waiting.circumstances)

    def _prediction(self) -> Step | None:
        foresight = self._foresight
        job = foresight.next_job() if foresight is not None else None
        if foresight is None or job is None:
            return None
        if isinstance(job, SumUp):
            about = f"key content of {len(job.chunks)} chunks"
            return Step("abstract", about, job, foresight.lacking(), partial(foresight.do, job))
        return Step("prediction", "questions to come", job, 1, partial(foresight.do, job))

    def _restoration(self) -> Step | None:
        limit, seen = self._store.limit_bytes, self._record.fact(_LIMIT)
        if self._to_restore is None and seen is not None and limit > seen:
            self._to_restore = self._ahead.repeats.answers.most_used()
        if not self._to_restore:
            if limit != seen:
                self._record.note(_LIMIT, limit)
            return None
        left = len(self._to_restore)
        question, circumstances = self._to_restore.pop(0)
        key = ("restoration", question, circumstances)
        return Step(
            "restoration",
            question,
            key,
            left,
            lambda: _no_result(self._ahead.restore(question, circumstances)),
        )


def _no_result(value: object) -> None:
    """What a step brings is in the database."""


@dataclass(frozen=True, slots=True)
class IdleSetup:
    """What idle work is made of: `work` makes that of one run. No model is loaded before a step needs it."""

    records: KnowledgeBaseState
    parts: Components
    repeats: CachedAnswers
    choices: Choices
    terms: KBMetadata
    idle_record: BackgroundBudget
    prediction: PredictionConfig

    def work(self, breathe: Callable[[], None]) -> JobSource:
        """The work of one run, which calls `breathe` between parts that run no model."""
        parts = cache(self.parts.for_request)
        return JobSource(
            Precomputer(
                parts, replace(self.repeats, predictions=None), self.terms.system, self.choices.decoded_from
            ),
            self._foresight(parts),
            self.records.predictions,
            self.records.store,
            self.idle_record,
            extent(self.repeats.threshold, self.prediction.decode_cutoff),
            breathe,
        )

    def _foresight(self, parts: Callable[[], Parts]) -> QuestionPredictor | None:
        """What predicts questions as users are expected to ask them: by the settings alone; None if no answer is kept."""
        recipe = self.choices.recipe()
        chunks = sum(document.chunks for document in self.records.shelf.list())
        expected = self.choices.circumstances(recipe, Options(), min(self.choices.top_k(), chunks))
        if expected is None or not self.records.answers.limit_bytes:
            return None
        return QuestionPredictor(
            parts,
            self.records.shelf,
            self.records.answers,
            self.records.predictions,
            recipe,
            expected,
            self.terms.system,
            self.repeats.threshold,
            self.prediction.prediction_stride,
        )
