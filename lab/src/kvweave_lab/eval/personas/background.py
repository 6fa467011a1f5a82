"""The work of a system at idle time, before the first question and after each one: PerCache's protocol (§5.3).

A system that predicts from a summary summarises the notes and predicts two rounds of questions from it; after each of the
user's questions it predicts one round from them. Work that a budget has no room for is done later. A system that predicts
from raw notes continues round by round. The system then computes predicted questions, and correct answers for questions
that got another question's answer. There is no clock: all idle work is done before the next question.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvweave.answer_cache.evidence import is_non_answer
from kvweave.answer_cache.predictions import ChunkRef, SummaryPart
from kvweave.answer_cache.records import PendingQuestion, PendingReason
from kvweave.background.planning import (
    ROUNDS_PER_PART,
    PredictFromDocuments,
    PredictFromHistory,
    Summarise,
)
from kvweave.background.prediction import QuestionPredictor
from kvweave.background.prompts import PromptSet, Request, prompts_for
from kvweave.index.documents import version_of
from kvweave_lab.eval.personas.model import ModelPass
from kvweave_lab.eval.personas.pricing import Shape
from kvweave_lab.eval.personas.session import IdlePeriod, UserSession, limit_bytes

Step = tuple[str, Callable[[], None]]
"""A kind and an action."""


class _MemoizedPredictor(QuestionPredictor):
    """The product's predictor, with replies computed once for all systems and their cost charged to this one."""

    def __init__(self, session: UserSession, charge: Callable[[ModelPass], None]) -> None:
        corpus = session.corpus
        super().__init__(
            lambda: corpus.context(session.store),
            corpus.documents,
            session.answers,
            session.predictions,
            session.recipe,
            session.answer_settings,
            corpus.system,
            session.setting.threshold,
            stride=1,  # a round is split into `setting.stride` jobs, each for another part of the summary
        )
        self._model, self._system, self._charge = corpus.model, corpus.system, charge

    def reply(self, notes: Sequence[str], request: Request, draw: int) -> str:
        """Return the model's reply and charge its cost."""
        reply = self._model.generate(notes, request, draw, self._system)
        self._charge(reply.model_pass)
        return reply.text


class BackgroundRunner:
    """Runs the idle work of one session.

    Args:
        session: the session.
        shape: that operations are counted at.
    """

    def __init__(self, session: UserSession, shape: Shape) -> None:
        self._session, self._shape = session, shape
        self._flops = 0.0
        self._overdraft = 0.0  # operations spent beyond earlier budgets
        self._predictor = _MemoizedPredictor(session, self._charge)
        self._batches_to_summarise = self._batches()
        self._summary_rounds_left = ROUNDS_PER_PART * session.setting.stride
        self._history_rounds = 0
        self._tried: set[str] = set()
        self._limit = session.setting.limit_tokens

    def run(self, budget: float | None, *, first: bool) -> IdlePeriod:
        """Work until the protocol has no more steps here, or the budget of operations is spent.

        A step that has begun is finished; what it takes beyond the budget is deducted from the next one. `first` means
        before the first question.
        """
        self._flops, steps = 0.0, Counter[str]()
        if first and self._session.system.kv == "anywhere":
            self._flops += self._session.corpus.prepared_flops
            steps["preparation"] += 1
        remaining = self._steps(first)
        while budget is None or self._flops + self._overdraft < budget:
            step = next(remaining, None)  # taken only once there is budget for it
            if step is None:
                break
            kind, act = step
            act()
            steps[kind] += 1
        if budget is not None:
            self._overdraft = max(0.0, self._flops + self._overdraft - budget)
        return IdlePeriod(dict(steps), self._flops)

    def _charge(self, model_pass: ModelPass) -> None:
        self._flops += self._shape.flops(model_pass)

    # Steps in order. Each step may change which ones follow.

    def _steps(self, first: bool) -> Iterator[Step]:
        predicts_from = self._session.system.predicts_from
        if predicts_from == "nothing":
            return
        if predicts_from == "summary":
            yield from self._pending_steps("answers", ("matched",))
        yield from self._pending_steps("population", ("predicted",))
        yield from self._conversions()
        for prediction in self._predictions(first):
            yield "prediction", prediction
            yield from self._pending_steps("population", ("predicted",))

    def _predictions(self, first: bool) -> Iterator[Callable[[], None]]:
        session = self._session
        if session.system.predicts_from == "notes":
            yield from self._note_predictions()
            return
        while self._batches_to_summarise:
            yield partial(self._predictor.do, Summarise(self._batches_to_summarise.pop(0)))
        if not first and session.predictions.history.has_new:
            number = session.predictions.history.last
            for _ in range(session.setting.stride):
                yield partial(self._predict_from_history, number)
        while self._summary_rounds_left:
            self._summary_rounds_left -= 1
            yield self._predict_from_summary

    def _note_predictions(self) -> Iterator[Callable[[], None]]:
        """Predict from raw chunks instead of a summary (Sleep-time Compute), with as many rounds per batch."""
        summary, index = self._session.predictions.summary, self._session.corpus.index
        if not summary.parts():
            for batch in self._batches():
                texts = index.texts([chunk.name for chunk in batch])
                summary.put(batch, "\n\n".join(texts[chunk.name] for chunk in batch))
        most = ROUNDS_PER_PART * self._session.setting.stride
        while any(part.rounds < most for part in summary.parts()):
            yield self._predict_from_summary

    def _batches(self) -> list[tuple[ChunkRef, ...]]:
        """Group all chunks in reading order into batches that the model summarises at once."""
        corpus = self._session.corpus
        most = self._prompts.batch_tokens or corpus.adapter.geometry.context_tokens // 4
        batches: list[list[ChunkRef]] = []
        room = 0
        for row in corpus.documents.all_chunks():
            if not batches or row.kv_tokens > room:
                batches.append([])
                room = most
            batches[-1].append(ChunkRef(row.row_id, version_of(row.row_id), row.kv_tokens))
            room -= row.kv_tokens
        return [tuple(batch) for batch in batches]

    @property
    def _prompts(self) -> PromptSet:
        adapter = self._session.corpus.adapter
        return prompts_for(adapter.fingerprint.name, chat=adapter.template.is_chat)

    def _predict_from_summary(self) -> None:
        parts = self._session.predictions.summary.parts()
        if parts:
            part = min(parts, key=lambda each: (each.rounds, each.id))
            self._predictor.do(PredictFromDocuments(part, tuple(other for other in parts if other != part)))

    def _predict_from_history(self, number: int) -> None:
        parts = self._session.predictions.summary.parts()
        if not parts:
            return
        start = self._history_rounds % len(parts)
        self._history_rounds += 1
        rotated: tuple[SummaryPart, ...] = (*parts[start:], *parts[:start])
        earlier = tuple(self._session.predictions.history.recent(self._prompts.earlier_questions))
        self._predictor.do(PredictFromHistory(earlier, rotated, number))

    # Pending questions

    def _pending_steps(self, kind: str, reasons: tuple[PendingReason, ...]) -> Iterator[Step]:
        act = self._populate if kind == "population" else self._answer
        while pending := self._untried(kind, reasons):
            question = pending[0]
            self._tried.add(f"{kind} {question.question}")
            yield kind, partial(act, question)

    def _untried(self, kind: str, reasons: tuple[PendingReason, ...]) -> list[PendingQuestion]:
        pending = self._session.answers.pending(most=10_000, reasons=reasons)
        return [one for one in pending if f"{kind} {one.question}" not in self._tried]

    def _populate(self, pending: PendingQuestion) -> None:
        if self._answers_ahead:
            self._answer(pending)
            return
        self._prefill(pending.question)
        self._session.answers.mark_prefilled(pending.question, pending.options)

    @property
    def _answers_ahead(self) -> bool:
        setting = self._session.setting
        if "predicted" not in self._session.system.fills_answers:
            return False
        return not setting.schedules or setting.threshold <= setting.cutoff

    def _prefill(self, question: str) -> None:
        session = self._session
        if "predicted" in session.system.fills_kv:
            self._charge(session.prefill(question).model_pass)

    def _answer(self, pending: PendingQuestion) -> None:
        session, question = self._session, pending.question
        reply = session.compute(question, "predicted")
        self._charge(reply.model_pass)
        if pending.reason in ("predicted", "prefilled") and is_non_answer(session.short_answer(reply.text)):
            if session.predictions.predicted.drop(question, "no answer"):
                session.answers.delete([question])
        else:
            session.store_answer(question, session.corpus.encoder.encode([question])[0], reply.text)

    def _conversions(self) -> Iterator[Step]:
        """Compute skipped answers after τ has fallen, and evicted KV after its limit has risen (§4.3.3)."""
        setting = self._session.setting
        if not setting.schedules:
            return
        if self._answers_ahead:
            yield from self._pending_steps("conversion", ("prefilled",))
        limit, before = setting.limit_tokens, self._limit
        self._limit = limit
        if limit is not None and before is not None and limit > before:
            for question, _ in self._session.answers.most_used():
                if self._fits(question):
                    yield "restoration", partial(self._prefill, question)

    def _fits(self, question: str) -> bool:
        """Return whether the KV of a question's prompt fits without evicting anything."""
        store, corpus = self._session.store, self._session.corpus
        size = limit_bytes(corpus.adapter, corpus.prompt(question).tokens)
        return size <= store.limit_bytes - store.used_bytes
