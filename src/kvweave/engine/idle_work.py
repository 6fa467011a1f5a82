"""What there is to do at idle time, one step after the other, from what the knowledge base's database says.

Nothing is planned ahead: every step changes what the next one is chosen by, so that whoever is killed goes on by asking
again. Knows neither when to work nor what it may cost.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from kvweave.answers.records import Circumstances, Waiting, Why
from kvweave.engine.ahead import Ahead
from kvweave.engine.foresight import Foresight
from kvweave.engine.idle_record import IdleRecord
from kvweave.predict.outlook import Outlook
from kvweave.predict.plan import SumUp
from kvweave.predict.population import Extent
from kvweave.predict.screening import says_nothing
from kvweave.store.chunk_store import ChunkStore

Kind: TypeAlias = Literal[
    "refresh", "answers", "population", "conversion", "abstract", "prediction", "restoration"
]
"""See `IdleWork.next`."""

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


class IdleWork:
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
        ahead: Ahead,
        foresight: Foresight | None,
        outlook: Outlook,
        store: ChunkStore,
        record: IdleRecord,
        extent: Extent,
        breathe: Callable[[], None],
    ) -> None:
        self._ahead = ahead
        self._foresight = foresight
        self._outlook = outlook
        self._store = store
        self._record = record
        self._extent = extent
        self._breathe = breathe
        self._tried: set[Hashable] = set()
        self._to_restore: list[tuple[str, Circumstances]] | None = None

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

    def _waiting(self, kind: Kind, whys: tuple[Why, ...], do: Callable[[Waiting], None]) -> Step | None:
        found = self._ahead.repeats.answers.waiting(most=len(self._tried) + 100, whys=whys)
        left = [one for one in found if (kind, one.question, one.circumstances) not in self._tried]
        if not left:
            return None
        first = left[0]
        key = (kind, first.question, first.circumstances)
        return Step(kind, first.question, key, len(left), partial(do, first))

    def _populate(self, waiting: Waiting) -> None:
        if self._extent == "answer":
            self._answer(waiting)
            return
        self._ahead.prefill(waiting.question, waiting.circumstances)
        self._ahead.repeats.answers.prefilled(waiting.question, waiting.circumstances)

    def _answer(self, waiting: Waiting) -> None:
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
