"""Rows from priced sessions: each system, each against the others, and what the further experiments changed.

Intervals are by bootstrap over users, since a user's questions depend on each other; two systems are compared on the same
users, resampled together.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvweave_lab.eval.personas.pricing import TABLES, Prices, Table, tail
from kvweave_lab.eval.personas.served import Served, Session
from kvweave_lab.eval.personas.systems import System
from kvweave_lab.eval.personas.trials import Trial
from kvweave_lab.eval.results import Estimate
from kvweave_lab.eval.statistics import Scores, interval_over_tasks, ratio_over_tasks


@dataclass(frozen=True, slots=True)
class SystemRow:
    """A trial in one table; rates and qualities 0..1, over all users' questions.

    Attributes:
        table: A (projection reuse) or B (ordinary reuse).
        experiment, trial: what was tried.
        users, questions: how many.
        mean_s, tail_s: latency of a question: its mean, and the time within which 95 % are answered.
        qa_hit: share of questions that the bank answered.
        kv_hit: share of retrieved tokens with stored KV, of questions that the bank did not answer.
        other_words: share of questions that the bank answered from a question in other words.
        foreseen: share of questions that a predicted question's answer was given to.
        kv_foreseen: share of retrieved tokens whose KV a predicted question had left, as part of `kv_hit`.
        rouge_l, exact_match, bleu: of the answers; None for BLEU where sacrebleu was not installed.
        request_flops: operations of a question.
        idle_flops: operations at idle time, of a user.
        stored_bytes: at the end, of a user.
        predicted: questions that were predicted and kept, of a user.
    """

    table: Table
    experiment: str
    trial: str
    users: int
    questions: int
    mean_s: Estimate
    tail_s: float
    qa_hit: Estimate
    kv_hit: Estimate
    other_words: Estimate
    foreseen: Estimate
    kv_foreseen: Estimate
    rouge_l: Estimate
    exact_match: Estimate
    bleu: Estimate | None
    request_flops: float
    idle_flops: float
    stored_bytes: float
    predicted: float


@dataclass(frozen=True, slots=True)
class PairRow:
    """A system against another on the same users: `faster` is the share of mean latency that it saves.

    `rouge_l` and `exact_match` are what it gains; all three with paired intervals. `best_user` is the largest saving of
    any one user.
    """

    table: Table
    system: str
    other: str
    faster: Estimate
    rouge_l: Estimate
    exact_match: Estimate
    best_user: float


@dataclass(frozen=True, slots=True)
class UserRow:
    """One user under one system, in the terms of `SystemRow`."""

    table: Table
    system: str
    user: str
    mean_s: float
    tail_s: float
    qa_hit: float
    kv_hit: float
    other_words: float
    foreseen: float
    rouge_l: float
    exact_match: float
    request_flops: float
    idle_flops: float
    stored_bytes: int


Means = npt.NDArray[np.float64]
"""Mean latency of every user, in seconds: (users,)."""
Lived = Mapping[str, Sequence[Session]]
"""Sessions by the trial's key, each over the same users in the same order."""


def system_rows(trials: Iterable[Trial], lived: Lived, prices: Prices) -> list[SystemRow]:
    """Every trial in both tables."""
    return [
        _row(table, trial, lived[trial.key], prices)
        for trial in trials
        for table in TABLES
        if lived.get(trial.key)
    ]


def _row(table: Table, trial: Trial, sessions: Sequence[Session], prices: Prices) -> SystemRow:
    priced = [prices.requests(session, trial.system, table) for session in sessions]
    everything = [request for requests in priced for request in requests]
    return SystemRow(
        table=table,
        experiment=trial.experiment,
        trial=trial.name,
        users=len(sessions),
        questions=len(everything),
        mean_s=_estimate([statistics.fmean(each.latency_s for each in requests) for requests in priced]),
        tail_s=tail([request.latency_s for request in everything]),
        qa_hit=_share(sessions, lambda served: served.cache_hit is not None),
        kv_hit=_estimate([kv_hit(session) for session in sessions]),
        other_words=_share(sessions, lambda served: served.other_words),
        foreseen=_share(sessions, lambda served: served.foreseen),
        kv_foreseen=_estimate([_of_retrieved(session, lambda one: one.found_ahead) for session in sessions]),
        rouge_l=_share(sessions, lambda served: served.rouge_l),
        exact_match=_share(sessions, lambda served: served.exact_match),
        bleu=_bleu(sessions),
        request_flops=statistics.fmean(request.flops for request in everything),
        idle_flops=statistics.fmean(sum(spell.flops for spell in session.idle) for session in sessions),
        stored_bytes=statistics.fmean(
            prices.stored_bytes(session, trial.system, table) for session in sessions
        ),
        predicted=statistics.fmean(session.held.predicted for session in sessions),
    )


def kv_hit(session: Session) -> float:
    """Reused over retrieved tokens of chunks; 0 where the bank answered everything."""
    return _of_retrieved(session, lambda served: served.found)


def _of_retrieved(session: Session, tokens: Callable[[Served], int]) -> float:
    context = sum(served.context for served in session.served)
    return sum(map(tokens, session.served)) / context if context else 0.0


def pair_rows(systems: Sequence[System], lived: Lived, prices: Prices) -> list[PairRow]:
    """Each system that predicts as PerCache does against every other one, in both tables."""
    rows = []
    for table in TABLES:
        means = {system.name: _means(table, system, lived, prices) for system in systems}
        for system in systems:
            if system.foresees != "abstract":
                continue
            rows += [
                _pair(table, system.name, other.name, means, lived) for other in systems if other != system
            ]
    return rows


def _means(table: Table, system: System, lived: Lived, prices: Prices) -> Means:
    sessions = lived[f"systems/{system.name}"]
    return np.array(
        [
            statistics.fmean(each.latency_s for each in prices.requests(session, system, table))
            for session in sessions
        ]
    )


def _pair(table: Table, one: str, other: str, means: Mapping[str, Means], lived: Lived) -> PairRow:
    ours, theirs = means[one] / means[other].mean(), means[other] / means[other].mean()
    faster = ratio_over_tasks([Scores(theirs - ours, theirs, np.zeros_like(theirs))])
    assert faster is not None
    quality = {
        name: [
            _of(mine, name) - _of(their, name)
            for mine, their in zip(lived[f"systems/{one}"], lived[f"systems/{other}"], strict=True)
        ]
        for name in ("rouge_l", "exact_match")
    }
    best = float((1 - means[one] / means[other]).max())
    return PairRow(
        table, one, other, faster, _estimate(quality["rouge_l"]), _estimate(quality["exact_match"]), best
    )


def user_rows(systems: Iterable[System], lived: Lived, prices: Prices) -> list[UserRow]:
    """Every user under every system, in both tables."""
    return [
        _user(table, system, session, prices)
        for table in TABLES
        for system in systems
        for session in lived[f"systems/{system.name}"]
    ]


def _user(table: Table, system: System, session: Session, prices: Prices) -> UserRow:
    priced = prices.requests(session, system, table)
    return UserRow(
        table=table,
        system=system.name,
        user=session.user,
        mean_s=statistics.fmean(each.latency_s for each in priced),
        tail_s=tail([each.latency_s for each in priced]),
        qa_hit=statistics.fmean(served.cache_hit is not None for served in session.served),
        kv_hit=kv_hit(session),
        other_words=_of(session, "other_words"),
        foreseen=_of(session, "foreseen"),
        rouge_l=_of(session, "rouge_l"),
        exact_match=_of(session, "exact_match"),
        request_flops=statistics.fmean(each.flops for each in priced),
        idle_flops=sum(spell.flops for spell in session.idle),
        stored_bytes=prices.stored_bytes(session, system, table),
    )


def _of(session: Session, name: str) -> float:
    return statistics.fmean(float(getattr(served, name)) for served in session.served)


def _bleu(sessions: Iterable[Session]) -> Estimate | None:
    by_user = [[served.bleu for served in session.served] for session in sessions]
    if any(score is None for scores in by_user for score in scores):
        return None
    return _estimate([statistics.fmean(score or 0.0 for score in scores) for scores in by_user])


def _share(sessions: Iterable[Session], of: Callable[[Served], float]) -> Estimate:
    return _estimate([statistics.fmean(float(of(served)) for served in each.served) for each in sessions])


def _estimate(by_user: Sequence[float]) -> Estimate:
    return interval_over_tasks([by_user])
