"""Rows made from priced sessions: systems, pairs of systems, users, and PerCache's scheduler experiments.

Intervals are bootstrapped over users, since the questions of a user depend on each other. Two systems are compared on the
same users, resampled together.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvweave_lab.eval.personas.pricing import TABLES, Decoding, Prices, Table, tail_latency
from kvweave_lab.eval.personas.session import ServedQuestion, SessionRecord
from kvweave_lab.eval.personas.systems import Answers, System, Trial, system_trial
from kvweave_lab.statistics import Estimate, Scores, interval_over_tasks, ratio_over_tasks

UserLatencies = npt.NDArray[np.float64]
"""Mean latency of each user, in seconds: (users,)."""
SessionsByTrial = Mapping[str, Sequence[SessionRecord]]
"""Sessions by trial key, always of the same users in the same order."""


@dataclass(frozen=True, slots=True)
class SystemRow:
    """A trial in one table, over all users' questions; rates and qualities are 0..1.

    Attributes:
        answers: short or long replies.
        decoding: token by token, or with prompt lookup.
        table: A (projection reuse) or B (ordinary reuse).
        experiment, trial: the trial's names.
        users, questions: their numbers.
        mean_s, tail_s: latency of a question: its mean, and the time within which 95 % are answered.
        qa_hit: share of questions answered from the cache.
        kv_hit: share of retrieved tokens with stored KV, over questions with computed answers.
        other_words: share of questions answered from the cache with the answer to a question in other words.
        foreseen: share of questions that got the answer to a predicted question.
        kv_foreseen: the part of `kv_hit` whose KV was stored for a predicted question.
        rouge_l, exact_match, bleu: of the answers; None for BLEU where sacrebleu was not installed.
        request_flops: operations per question.
        idle_flops: operations at idle time per user.
        stored_bytes: at the end, per user.
        predicted: accepted predicted questions, per user.
        reply_tokens: of a computed reply.
        drafted: share of these that prompt lookup drafted and the model accepted.
    """

    answers: Answers
    decoding: Decoding
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
    reply_tokens: float
    drafted: float


@dataclass(frozen=True, slots=True)
class PairRow:
    """A system compared with another on the same users.

    `faster` is the share of mean latency that it saves, `rouge_l` and `exact_match` are its gains; all three have paired
    intervals. `best_user` is the largest saving of any user.
    """

    answers: Answers
    decoding: Decoding
    table: Table
    system: str
    other: str
    faster: Estimate
    rouge_l: Estimate
    exact_match: Estimate
    best_user: float


@dataclass(frozen=True, slots=True)
class UserRow:
    """One user under one system, with the columns of `SystemRow`."""

    answers: Answers
    decoding: Decoding
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


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """One of PerCache's experiments with or without its scheduler (§5.5), question by question, means over users.

    Attributes:
        trial: its name.
        idle_flops: cumulative operations at idle time, before each question and after the last.
        latency_s: of each question, with projection reuse and token by token, as in the paper.
        qa_hit: share of questions answered from the cache, after the change.
        kv_hit: share of retrieved tokens with stored KV, after the change.
        steps: steps of idle work by kind, per user.
    """

    trial: str
    idle_flops: tuple[float, ...]
    latency_s: tuple[float, ...]
    qa_hit: float
    kv_hit: float
    steps: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saving:
    """Shares that the scheduler saves: of all idle operations, and of a question's latency after the change."""

    experiment: str
    idle_flops: float
    latency: float


def system_rows(
    trials: Iterable[Trial], sessions: SessionsByTrial, prices: Prices, decodings: Sequence[Decoding]
) -> list[SystemRow]:
    """Return a row for every trial in both tables, under each way of decoding."""
    return [
        _system_row(decoding, table, trial, sessions[trial.key], prices)
        for trial in trials
        for decoding in decodings
        for table in TABLES
        if sessions.get(trial.key)
    ]


def _system_row(
    decoding: Decoding, table: Table, trial: Trial, sessions: Sequence[SessionRecord], prices: Prices
) -> SystemRow:
    priced = [prices.requests(session, trial.system, table, decoding) for session in sessions]
    passes = [one.model_pass for session in sessions for one in session.served if one.model_pass is not None]
    reply_tokens = sum(one.decoded for one in passes)
    requests_of_all = [request for requests in priced for request in requests]
    return SystemRow(
        answers=trial.answers,
        decoding=decoding,
        table=table,
        experiment=trial.experiment,
        trial=trial.name,
        users=len(sessions),
        questions=len(requests_of_all),
        mean_s=_estimate([statistics.fmean(each.latency_s for each in requests) for requests in priced]),
        tail_s=tail_latency([request.latency_s for request in requests_of_all]),
        qa_hit=_share(sessions, lambda served: served.is_hit),
        kv_hit=_estimate([kv_hit(session) for session in sessions]),
        other_words=_share(sessions, lambda served: served.is_reworded_hit),
        foreseen=_share(sessions, lambda served: served.was_predicted),
        kv_foreseen=_estimate(
            [_share_of_retrieved(session, lambda one: one.found_predicted) for session in sessions]
        ),
        rouge_l=_share(sessions, lambda served: served.rouge_l),
        exact_match=_share(sessions, lambda served: served.exact_match),
        bleu=_bleu(sessions),
        request_flops=statistics.fmean(request.flops for request in requests_of_all),
        idle_flops=statistics.fmean(sum(period.flops for period in session.idle) for session in sessions),
        stored_bytes=statistics.fmean(
            prices.stored_bytes(session, trial.system, table) for session in sessions
        ),
        predicted=statistics.fmean(session.stored.predicted for session in sessions),
        reply_tokens=reply_tokens / len(passes) if passes else 0.0,
        drafted=sum(one.accepted_draft_tokens for one in passes) / reply_tokens if reply_tokens else 0.0,
    )


def kv_hit(session: SessionRecord) -> float:
    """Return reused over retrieved chunk tokens; 0 if all answers came from the cache."""
    return _share_of_retrieved(session, lambda served: served.found)


def _share_of_retrieved(session: SessionRecord, tokens: Callable[[ServedQuestion], int]) -> float:
    context = sum(served.context for served in session.served)
    return sum(map(tokens, session.served)) / context if context else 0.0


def pair_rows(
    answers: Answers,
    decoding: Decoding,
    systems: Sequence[System],
    sessions: SessionsByTrial,
    prices: Prices,
) -> list[PairRow]:
    """Compare each system that predicts as PerCache does with every other one, in both tables."""
    scored = {system.name: sessions[system_trial(system, answers).key] for system in systems}
    rows = []
    for table in TABLES:
        means = {
            system.name: np.array(
                [
                    statistics.fmean(
                        each.latency_s for each in prices.requests(session, system, table, decoding)
                    )
                    for session in scored[system.name]
                ]
            )
            for system in systems
        }
        for system in systems:
            if system.predicts_from != "summary":
                continue
            rows += [
                _pair_row(answers, decoding, table, (system.name, other.name), means, scored)
                for other in systems
                if other != system
            ]
    return rows


def _pair_row(
    answers: Answers,
    decoding: Decoding,
    table: Table,
    pair: tuple[str, str],
    means: Mapping[str, UserLatencies],
    scored: SessionsByTrial,
) -> PairRow:
    """Return the row of a pair; `means` and `scored` are by the systems' names."""
    one, other = pair
    own, others = means[one] / means[other].mean(), means[other] / means[other].mean()
    faster = ratio_over_tasks([Scores(others - own, others, np.zeros_like(others))])
    assert faster is not None
    rouge_l, exact_match = (
        _estimate(
            [
                _mean_of(mine, name) - _mean_of(their, name)
                for mine, their in zip(scored[one], scored[other], strict=True)
            ]
        )
        for name in ("rouge_l", "exact_match")
    )
    best = float((1 - means[one] / means[other]).max())
    return PairRow(answers, decoding, table, one, other, faster, rouge_l, exact_match, best)


def user_rows(
    answers: Answers,
    decoding: Decoding,
    systems: Iterable[System],
    sessions: SessionsByTrial,
    prices: Prices,
) -> list[UserRow]:
    """Return a row for every user under every system, in both tables."""
    return [
        _user_row(answers, decoding, table, system, session, prices)
        for table in TABLES
        for system in systems
        for session in sessions[system_trial(system, answers).key]
    ]


def _user_row(
    answers: Answers,
    decoding: Decoding,
    table: Table,
    system: System,
    session: SessionRecord,
    prices: Prices,
) -> UserRow:
    priced = prices.requests(session, system, table, decoding)
    return UserRow(
        answers=answers,
        decoding=decoding,
        table=table,
        system=system.name,
        user=session.user,
        mean_s=statistics.fmean(each.latency_s for each in priced),
        tail_s=tail_latency([each.latency_s for each in priced]),
        qa_hit=statistics.fmean(served.is_hit for served in session.served),
        kv_hit=kv_hit(session),
        other_words=_mean_of(session, "is_reworded_hit"),
        foreseen=_mean_of(session, "was_predicted"),
        rouge_l=_mean_of(session, "rouge_l"),
        exact_match=_mean_of(session, "exact_match"),
        request_flops=statistics.fmean(each.flops for each in priced),
        idle_flops=sum(period.flops for period in session.idle),
        stored_bytes=prices.stored_bytes(session, system, table),
    )


def scheduler_rows(trials: Sequence[Trial], sessions: SessionsByTrial, prices: Prices) -> list[SchedulerRow]:
    """Return a row for each trial."""
    return [_scheduler_row(trial, sessions[trial.key], prices) for trial in trials if sessions.get(trial.key)]


def _scheduler_row(trial: Trial, sessions: Sequence[SessionRecord], prices: Prices) -> SchedulerRow:
    idle_flops = [[period.flops for period in session.idle] for session in sessions]
    means = [statistics.fmean(flops) for flops in zip(*idle_flops, strict=True)]
    priced = [prices.requests(session, trial.system, "A", "token") for session in sessions]
    later = [served for session in sessions for served in session.served[len(session.served) // 2 :]]
    context = sum(served.context for served in later)
    kinds = sorted({kind for session in sessions for period in session.idle for kind in period.steps})
    return SchedulerRow(
        trial=trial.name,
        idle_flops=tuple(sum(means[: number + 1]) for number in range(len(means))),
        latency_s=tuple(
            statistics.fmean(request.latency_s for request in asked) for asked in zip(*priced, strict=True)
        ),
        qa_hit=statistics.fmean(served.is_hit for served in later),
        kv_hit=sum(served.found for served in later) / context if context else 0.0,
        steps={
            kind: sum(period.steps.get(kind, 0) for session in sessions for period in session.idle)
            / len(sessions)
            for kind in kinds
        },
    )


def savings(rows: Sequence[SchedulerRow]) -> list[Saving]:
    """Compare each experiment with the scheduler with the same one without it."""
    found = []
    by_name = {row.trial: row for row in rows}
    for row in rows:
        name, _, label = row.trial.rpartition(", ")
        if label == "with" and f"{name}, without" in by_name:
            without = by_name[f"{name}, without"]
            found.append(
                Saving(
                    name,
                    1 - row.idle_flops[-1] / without.idle_flops[-1] if without.idle_flops[-1] else 0.0,
                    1 - _latency_after_change(row.latency_s) / _latency_after_change(without.latency_s),
                )
            )
    return found


def _latency_after_change(latency_s: Sequence[float]) -> float:
    return statistics.fmean(latency_s[len(latency_s) // 2 :])


def _mean_of(session: SessionRecord, name: str) -> float:
    return statistics.fmean(float(getattr(served, name)) for served in session.served)


def _bleu(sessions: Iterable[SessionRecord]) -> Estimate | None:
    by_user = [[served.bleu for served in session.served] for session in sessions]
    if any(score is None for scores in by_user for score in scores):
        return None
    return _estimate([statistics.fmean(score or 0.0 for score in scores) for scores in by_user])


def _share(sessions: Iterable[SessionRecord], of: Callable[[ServedQuestion], float]) -> Estimate:
    return _estimate([statistics.fmean(float(of(served)) for served in each.served) for each in sessions])


def _estimate(by_user: Sequence[float]) -> Estimate:
    return interval_over_tasks([by_user])
