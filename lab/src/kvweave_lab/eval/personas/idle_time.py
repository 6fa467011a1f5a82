"""What a system does before the first question and after each one: PerCache's protocol (§5.3) within a budget.

A system that predicts from an abstract sums the notes up, predicts two rounds from it, and one round from the user's
questions after each of them; what a budget had no room for comes later. One that predicts from raw notes goes on round by
round. Predicted questions are computed as
the system does it, and so are true answers for questions that were given another's. Knows no clock: everything here is
over before the next question comes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvweave.answer_cache.records import PendingQuestion, Why
from kvweave.engine.question_prediction import QuestionPredictor
from kvweave.predict.filters import says_nothing
from kvweave.predict.planning import KNOWLEDGE_ROUNDS, FromHistory, FromKnowledge, SumUp, extent
from kvweave.predict.prompts import wording_for
from kvweave.predict.store import ChunkName, Part
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.personas.passes import Pass
from kvweave_lab.eval.personas.served import IdleSpell
from kvweave_lab.eval.personas.shape import Shape
from kvweave_lab.eval.personas.user_session import UserSession, limit_bytes

Step = tuple[str, Callable[[], None]]
"""A kind, and what to do."""


class _Told(QuestionPredictor):
    """The engine's foresight, with replies that are read once for all systems and counted for this one."""

    def __init__(self, session: UserSession, recipe: Recipe, spend: Callable[[Pass], None]) -> None:
        notebook = session.notebook
        super().__init__(
            lambda: notebook.parts(session.store),
            notebook.shelf,
            session.answers,
            session.predictions,
            recipe,
            session.circumstances,
            notebook.system,
            session.setting.threshold,
            stride=1,  # a round is so many jobs as its stride says, each for another part of the abstract
        )
        self._reader, self._instruction, self._spend = notebook.reader, notebook.system, spend

    def said(self, notes: Sequence[str], request: str, draw: int) -> str:
        """The reply, and its cost noted."""
        read = self._reader.told(notes, request, draw, self._instruction)
        self._spend(read.took)
        return read.text


class BackgroundRunner:
    """The idle time of a session.

    Args:
        session: whose.
        shape: that operations are counted for.
    """

    def __init__(self, session: UserSession, shape: Shape) -> None:
        self._session, self._shape = session, shape
        self._flops = 0.0
        self._over = 0.0  # what was spent beyond earlier budgets
        self._foresight = _Told(session, session.recipe, self._spend)
        self._to_sum_up = self._batches()
        self._knowledge_left = KNOWLEDGE_ROUNDS * session.setting.stride
        self._parts_told = 0
        self._tried: set[str] = set()
        self._limit = session.setting.limit_tokens

    def spend(self, budget: float | None, *, first: bool) -> IdleSpell:
        """Work until nothing is left that the protocol has here, or the budget of operations is spent.

        A step that was begun is finished; what it takes beyond the budget is taken off the next one. `first` is before
        the first question.
        """
        self._flops, steps = 0.0, Counter[str]()
        if first and self._session.system.kv == "anywhere":
            self._flops += self._session.notebook.prepared_flops
            steps["preparation"] += 1
        todo = self._steps(first)
        while budget is None or self._flops + self._over < budget:
            step = next(todo, None)  # only what is done is taken
            if step is None:
                break
            kind, do = step
            do()
            steps[kind] += 1
        if budget is not None:
            self._over = max(0.0, self._flops + self._over - budget)
        return IdleSpell(dict(steps), self._flops)

    def _spend(self, took: Pass) -> None:
        self._flops += self._shape.flops(took)

    # What there is to do, in order; every step may change what comes next

    def _steps(self, first: bool) -> Iterator[Step]:
        system = self._session.system
        if system.foresees == "nothing":
            return
        if system.foresees == "abstract":
            yield from self._waiting("answers", ("matched",))
        yield from self._waiting("population", ("predicted",))
        yield from self._conversions()
        for prediction in self._predictions(first):
            yield "prediction", prediction
            yield from self._waiting("population", ("predicted",))

    def _predictions(self, first: bool) -> Iterator[Callable[[], None]]:
        session = self._session
        if session.system.foresees == "notes":
            yield from self._from_notes()
            return
        while self._to_sum_up:
            yield partial(self._foresight.do, SumUp(self._to_sum_up.pop(0)))
        if not first and session.predictions.history.has_news:
            number = session.predictions.history.last
            for _ in range(session.setting.stride):
                yield partial(self._from_history, number)
        while self._knowledge_left:
            self._knowledge_left -= 1
            yield self._from_knowledge

    def _from_notes(self) -> Iterator[Callable[[], None]]:
        """Raw chunks stand in for the abstract (Sleep-time Compute), each batch for as many rounds as it has there."""
        abstract, bank = self._session.predictions.abstract, self._session.notebook.bank
        if not abstract.parts():
            for batch in self._batches():
                texts = bank.texts([chunk.name for chunk in batch])
                abstract.put(batch, "\n\n".join(texts[chunk.name] for chunk in batch))
        most = KNOWLEDGE_ROUNDS * self._session.setting.stride
        while any(part.rounds < most for part in abstract.parts()):
            yield self._from_knowledge

    def _batches(self) -> list[tuple[ChunkName, ...]]:
        """All chunks in reading order, as many together as the model sums up at once."""
        notebook = self._session.notebook
        adapter = notebook.adapter
        wording = wording_for(adapter.fingerprint.name)
        most = wording.batch_tokens or adapter.geometry.context_tokens // 4
        batches: list[list[ChunkName]] = []
        room = 0
        for row in notebook.shelf.all_chunks():
            if not batches or row.kv_tokens > room:
                batches.append([])
                room = most
            batches[-1].append(ChunkName(row.row_id, row.row_id.rpartition(":")[0], row.kv_tokens))
            room -= row.kv_tokens
        return [tuple(batch) for batch in batches]

    def _from_knowledge(self) -> None:
        parts = self._session.predictions.abstract.parts()
        if parts:
            part = min(parts, key=lambda each: (each.rounds, each.id))
            self._foresight.do(FromKnowledge(part, tuple(other for other in parts if other != part)))

    def _from_history(self, number: int) -> None:
        parts = self._session.predictions.abstract.parts()
        if not parts:
            return
        start = self._parts_told % len(parts)
        self._parts_told += 1
        turned: tuple[Part, ...] = (*parts[start:], *parts[:start])
        most = wording_for(self._session.notebook.adapter.fingerprint.name).earlier_questions
        earlier = tuple(self._session.predictions.history.recent(most))
        self._foresight.do(FromHistory(earlier, turned, number))

    # Questions that wait

    def _waiting(self, kind: str, whys: tuple[Why, ...]) -> Iterator[Step]:
        do = self._populate if kind == "population" else self._answer
        while left := self._left(kind, whys):
            waiting = left[0]
            self._tried.add(f"{kind} {waiting.question}")
            yield kind, partial(do, waiting)

    def _left(self, kind: str, whys: tuple[Why, ...]) -> list[PendingQuestion]:
        found = self._session.answers.waiting(most=10_000, whys=whys)
        return [one for one in found if f"{kind} {one.question}" not in self._tried]

    def _populate(self, waiting: PendingQuestion) -> None:
        if self._answers_ahead:
            self._answer(waiting)
            return
        self._prefill(waiting.question)
        self._session.answers.prefilled(waiting.question, waiting.circumstances)

    @property
    def _answers_ahead(self) -> bool:
        setting = self._session.setting
        if "predicted" not in self._session.system.fills_answers:
            return False
        return not setting.schedules or extent(setting.threshold, setting.cutoff) == "answer"

    def _prefill(self, question: str) -> None:
        session = self._session
        if "predicted" in session.system.fills_kv:
            self._spend(session.prefill(question).took)

    def _answer(self, waiting: PendingQuestion) -> None:
        session, question = self._session, waiting.question
        read = session.read(question, "predicted")
        self._spend(read.took)
        if waiting.why in ("predicted", "prefilled") and says_nothing(read.text):
            if session.predictions.ledger.drop(question, "unanswerable"):
                session.answers.forget([question])
        else:
            session.keep(question, session.notebook.encoder.encode([question])[0], read.text)

    def _conversions(self) -> Iterator[Step]:
        """Answers that were left out, where τ has fallen; evicted KV, where its limit has risen (§4.3.3)."""
        setting = self._session.setting
        if not setting.schedules:
            return
        if self._answers_ahead:
            yield from self._waiting("conversion", ("prefilled",))
        limit, before = setting.limit_tokens, self._limit
        self._limit = limit
        if limit is not None and before is not None and limit > before:
            for question, _ in self._session.answers.most_used():
                if self._fits(question):
                    yield "restoration", partial(self._prefill, question)

    def _fits(self, question: str) -> bool:
        """Whether the KV of a question's prompt goes in without evicting anything."""
        store, notebook = self._session.store, self._session.notebook
        size = limit_bytes(notebook.adapter, notebook.prompt(question).tokens)
        return size <= store.limit_bytes - store.used_bytes
