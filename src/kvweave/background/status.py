"""The status of background work: cost, benefit, and whether it may run now. Loads no model."""

import time
from dataclasses import dataclass

from kvweave.answer_cache.predictions import PredictionCounts
from kvweave.background.conditions import (
    Condition,
    MachineState,
    OwnLoad,
    budget_condition,
    conditions,
    machine_state,
    seconds_per_day,
)
from kvweave.config import IdleConfig
from kvweave.state.background_budget import Spent, Worth, sum_of
from kvweave.state.knowledge_base_state import KnowledgeBaseState


@dataclass(frozen=True, slots=True)
class IdleStatus:
    """Cost and benefit of background work, and whether it may run now.

    Attributes:
        day: today by the local calendar, such as 2026-01-31.
        spent_today: what it cost today, and `spent` in all.
        seconds_per_day: the daily budget of such work as `conditions` are for; None without a limit.
        jobs_today: finished jobs of today by kind.
        worth_today: what was made and of use today, and `worth` in all.
        waiting: questions that wait for an answer.
        seconds: of work so far, by kind.
        predictions: what predicted questions were worth so far.
        promoted: questions that got the answer to a stored one ahead of time, and `promoted_given` answers given from them.
        dropped: predicted questions that were not worth an answer, by reason.
        summaries_dropped: summaries that questions are not predicted from, by reason.
        conditions: what must hold for work that no user has just asked for.
    """

    day: str
    spent_today: Spent
    spent: Spent
    seconds_per_day: float | None
    jobs_today: dict[str, int]
    worth_today: Worth
    worth: Worth
    waiting: int
    seconds: dict[str, float]
    predictions: PredictionCounts
    promoted: int
    promoted_given: int
    dropped: dict[str, int]
    summaries_dropped: dict[str, int]
    conditions: tuple[Condition, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no work is done now; empty if it may be."""
        return tuple(each.reason for each in self.conditions if each.reason)


def idle_status(
    state: KnowledgeBaseState, config: IdleConfig, machine: MachineState | None = None
) -> IdleStatus:
    """Return the status of a knowledge base's background work; `machine` is that of this one if it is not given."""
    budget, predictions = state.background_budget, state.predictions
    today = budget.totals(today=True)
    spent_today, spent, answers = sum_of(today.values()), budget.totals(), state.answers.totals()
    machine = machine_state(OwnLoad()) if machine is None else machine
    return IdleStatus(
        time.strftime("%Y-%m-%d"),
        spent_today,
        sum_of(spent.values()),
        seconds_per_day(config),
        {kind: spent.jobs for kind, spent in today.items()},
        budget.worth(today=True),
        budget.worth(),
        answers.waiting,
        {kind: each.seconds for kind, each in spent.items()},
        predictions.predicted.counts(),
        answers.promoted,
        answers.promoted_given,
        predictions.predicted.totals().reasons,
        predictions.summary.drops(),
        (*conditions(config, machine), budget_condition(config, spent_today)),
    )
