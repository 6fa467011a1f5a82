"""PerCache's three experiments with its scheduler (§5.5), question by question. Runs nothing."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave_lab.eval.personas.pricing import Prices
from kvweave_lab.eval.personas.served import Session
from kvweave_lab.eval.personas.summary import Lived
from kvweave_lab.eval.personas.trials import Trial


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """One experiment with or without the scheduler, means over users.

    Attributes:
        trial: which.
        idle_flops: operations at idle time so far, before each question and after the last.
        latency_s: of each question, projection reuse as in the paper.
        qa_hit: share of questions that the bank answered, after the change.
        kv_hit: share of retrieved tokens with stored KV, after the change.
        steps: of idle work by kind, of a user.
    """

    trial: str
    idle_flops: tuple[float, ...]
    latency_s: tuple[float, ...]
    qa_hit: float
    kv_hit: float
    steps: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saving:
    """What the scheduler saves of all operations at idle time, as a share, and what a question after the change gains."""

    experiment: str
    idle_flops: float
    latency: float


def scheduler_rows(trials: Sequence[Trial], lived: Lived, prices: Prices) -> list[SchedulerRow]:
    """A row for each trial."""
    return [_row(trial, lived[trial.key], prices) for trial in trials if lived.get(trial.key)]


def savings(rows: Sequence[SchedulerRow]) -> list[Saving]:
    """Each experiment with the scheduler against the same without it."""
    found = []
    by_name = {row.trial: row for row in rows}
    for row in rows:
        name, _, said = row.trial.rpartition(", ")
        if said == "with" and f"{name}, without" in by_name:
            plain = by_name[f"{name}, without"]
            found.append(
                Saving(
                    name,
                    1 - row.idle_flops[-1] / plain.idle_flops[-1] if plain.idle_flops[-1] else 0.0,
                    1 - _after(row.latency_s) / _after(plain.latency_s),
                )
            )
    return found


def _row(trial: Trial, sessions: Sequence[Session], prices: Prices) -> SchedulerRow:
    spells = [[spell.flops for spell in session.idle] for session in sessions]
    means = [statistics.fmean(flops) for flops in zip(*spells, strict=True)]
    priced = [prices.requests(session, trial.system, "A") for session in sessions]
    later = [served for session in sessions for served in session.served[len(session.served) // 2 :]]
    context = sum(served.context for served in later)
    kinds = sorted({kind for session in sessions for spell in session.idle for kind in spell.steps})
    return SchedulerRow(
        trial=trial.name,
        idle_flops=tuple(sum(means[: number + 1]) for number in range(len(means))),
        latency_s=tuple(
            statistics.fmean(request.latency_s for request in asked) for asked in zip(*priced, strict=True)
        ),
        qa_hit=statistics.fmean(served.cache_hit is not None for served in later),
        kv_hit=sum(served.found for served in later) / context if context else 0.0,
        steps={
            kind: sum(spell.steps.get(kind, 0) for session in sessions for spell in session.idle)
            / len(sessions)
            for kind in kinds
        },
    )


def _after(latency_s: Sequence[float]) -> float:
    return statistics.fmean(latency_s[len(latency_s) // 2 :])
