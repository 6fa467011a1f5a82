"""The whole evaluation: times of operations, a session of every trial with every user, and the rows made from them.

Sessions that the results log already has are not run again. The trials of one user run one after the other over one
corpus, so that what the model computes for one trial is available to the next.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.personas.background import BackgroundRunner
from kvweave_lab.eval.personas.corpus import CHUNK_TOKENS, TOP_K, MemoizedEncoder, UserCorpus
from kvweave_lab.eval.personas.costs import Costs, measure_costs
from kvweave_lab.eval.personas.execute import (
    ExecutedRow,
    ExecutedUser,
    Executor,
    execute_user,
    executed_rows,
    parse_executed,
)
from kvweave_lab.eval.personas.model import MemoizedModel, ModelPass
from kvweave_lab.eval.personas.pricing import (
    DECODINGS,
    Decoding,
    OperationRow,
    Prices,
    Shape,
    operation_rows,
)
from kvweave_lab.eval.personas.session import (
    IdlePeriod,
    ServedQuestion,
    SessionRecord,
    StoredTotals,
    UserSession,
)
from kvweave_lab.eval.personas.summary import (
    PairRow,
    SchedulerRow,
    SystemRow,
    UserRow,
    pair_rows,
    scheduler_rows,
    system_rows,
    user_rows,
)
from kvweave_lab.eval.personas.systems import (
    ANSWERS,
    OURS,
    SYSTEMS,
    Answers,
    Trial,
    ablations,
    budget_trial,
    comparison,
    scheduling,
    sweeps,
    system_trial,
    with_answers,
)
from kvweave_lab.eval.personas.users import User
from kvweave_lab.results_log import ResultsLog, run_config

LOG_VERSION: Final = 7
"""Version of the meaning of a session; raise it when older sessions would mislead."""
_LOG: Final = "sessions.jsonl"
_EXECUTED_LOG: Final = "executed.jsonl"
_EXECUTED_VERSION: Final = 1

SessionLog: TypeAlias = ResultsLog[tuple[str, str], SessionRecord]
"""Session records by trial and user."""
ExecutedLog: TypeAlias = ResultsLog[tuple[str, str], ExecutedUser]
"""Executed requests by length of replies and user."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare.

    Attributes:
        users: generated, or read from files.
        about: describes the users; a results log holds sessions of one kind of users only.
        ablations: number of users that also run the ablations and the scheduler's experiments.
        further: number of users that also run the sweeps.
        recipe: kvweave's recipe for reusing KV.
        output: folder of the sessions; None keeps them in memory.
        repeats: of each timing.
        answers: lengths of replies. Ablations, the scheduler's experiments and sweeps run with the last.
        decodings: how every system decodes.
        execute: number of users whose requests are executed at the shape too.
        execute_every: 1 executes all their questions, 2 every second one, and so on.
        costs: times of operations that were measured earlier; None to measure them.
        costs_about: commit and date of these, and on how many threads.
    """

    users: Sequence[User]
    about: dict[str, Any]
    further: int
    recipe: str
    output: Path | None = None
    repeats: int = 3
    ablations: int = 0
    answers: Sequence[Answers] = ANSWERS
    decodings: Sequence[Decoding] = DECODINGS
    execute: int = 0
    execute_every: int = 1
    costs: Costs | None = None
    costs_about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results; `about` describes what was compared."""

    about: dict[str, Any]
    costs: Costs
    systems: tuple[SystemRow, ...]
    pairs: tuple[PairRow, ...]
    users: tuple[UserRow, ...]
    further: tuple[SystemRow, ...] = field(default=())
    scheduler: tuple[SchedulerRow, ...] = field(default=())
    operations: tuple[OperationRow, ...] = field(default=())
    executed: tuple[ExecutedRow, ...] = field(default=())


def compare(
    adapter: Adapter,
    timed: Adapter,
    request: Request,
    progress: Progress = no_progress,
) -> Comparison:
    """Run the sessions that the results log lacks, and summarize all.

    Args:
        adapter: the model that answers.
        timed: a model in the shape that latency is computed for.
        request: what to compare.
        progress: receives the stage, units done and all units.

    Raises InvalidRequest without users, for a user without notes or questions, and for a folder of other sessions;
    UnknownRecipe.
    """
    users = list(request.users)
    if not users or not all(user.questions and user.notes for user in users):
        raise InvalidRequest("every user needs notes and questions, and there must be a user at least")
    recipe, encoder, shape = recipe_named(request.recipe), MemoizedEncoder(), Shape.of(timed)
    systems = [trial for answers in request.answers for trial in comparison(answers)]
    last = request.answers[-1]
    ablated = with_answers([*ablations(), *scheduling(CHUNK_TOKENS)], last)
    swept = with_answers(sweeps(CHUNK_TOKENS), last)
    trials = {
        user.name: [
            *systems,
            *(ablated if number < request.ablations else ()),
            *(swept if number < request.further else ()),
        ]
        for number, user in enumerate(users)
    }
    with _open_log(request, adapter, shape) as log:
        with UserCorpus(users[0], MemoizedModel(adapter), encoder, recipe, shape.cost) as corpus:
            questions = [asked.text for asked in users[0].questions]
            costs = request.costs or measure_costs(
                timed, corpus, questions, repeats=request.repeats, progress=progress
            )
            chunk_bytes = sum(len(note.text.encode()) for note in users[0].notes) / len(corpus.chunk_tokens)
            chunk_tokens = statistics.fmean(corpus.chunk_tokens)
        records = run_sessions(users, trials, log, adapter, encoder, recipe, shape, progress)
        executed = execute(request, log, adapter, timed, encoder, recipe, shape, progress)
    sessions: dict[str, list[SessionRecord]] = {}
    for record in records:
        sessions.setdefault(record.trial, []).append(record)
    prices, decodings = Prices(costs, shape), request.decodings
    regimes = [(answers, decoding) for answers in request.answers for decoding in decodings]
    in_table_order = [system_trial(system, answers) for answers in request.answers for system in SYSTEMS]
    budgets = [budget_trial(answers) for answers in request.answers]
    scheduled = [trial for trial in ablated if trial.experiment == "scheduler"]
    return Comparison(
        about=_about(request, adapter, shape, users),
        costs=costs,
        systems=tuple(system_rows(in_table_order, sessions, prices, decodings)),
        pairs=tuple(row for regime in regimes for row in pair_rows(*regime, SYSTEMS, sessions, prices)),
        users=tuple(row for regime in regimes for row in user_rows(*regime, SYSTEMS, sessions, prices)),
        further=tuple(system_rows([*ablated, *swept], sessions, prices, decodings)),
        scheduler=tuple(scheduler_rows(scheduled, sessions, prices)),
        operations=tuple(
            row
            for trial in budgets
            for row in operation_rows(trial, sessions[trial.key], prices, chunk_tokens, chunk_bytes)
        ),
        executed=tuple(executed_rows(executed, decodings, prices)) if executed else (),
    )


def execute(
    request: Request,
    log: SessionLog,
    adapter: Adapter,
    timed: Adapter,
    encoder: TextEncoder,
    recipe: Recipe,
    shape: Shape,
    progress: Progress = no_progress,
) -> list[ExecutedUser]:
    """Return the executed requests of the first users; execute those that their log lacks and add them."""
    users = request.users[: request.execute]
    if not users:
        return []
    with _open_executed_log(request, adapter, timed) as executed:
        missing = {
            user.name: [each for each in request.answers if executed.get((each, user.name)) is None]
            for user in users
        }
        if any(missing.values()):
            plain = TextEncoder(None)
            plain.load()
            with Executor(timed, request.output or Path.cwd(), request.decodings, plain) as executor:
                for number, user in enumerate(users):
                    progress("executing users' sessions", number, len(users))
                    with UserCorpus(user, MemoizedModel(adapter), encoder, recipe, shape.cost) as corpus:
                        for answers in missing[user.name]:
                            trials = comparison(answers)
                            budgets = {trial.key: _budgets(trial, user, log) for trial in trials}
                            every = request.execute_every
                            executed.add(execute_user(corpus, trials, budgets, shape, executor, every))
                    gc.collect()
        found = [executed.get((answers, user.name)) for answers in request.answers for user in users]
        return [one for one in found if one is not None]


def run_sessions(
    users: Sequence[User],
    trials: Mapping[str, Sequence[Trial]],
    log: SessionLog,
    adapter: Adapter,
    encoder: TextEncoder,
    recipe: Recipe,
    shape: Shape,
    progress: Progress = no_progress,
) -> list[SessionRecord]:
    """Return all session records, user by user; run those that the log lacks and add them.

    Args:
        users: in order.
        trials: by user name; those that set budgets come before those that share them.
        log: earlier records.
        adapter: the model that answers.
        encoder: for retrieval and question matching.
        recipe: reuses KV at any position.
        shape: that operations are counted at.
        progress: receives the number of sessions.
    """
    records: list[SessionRecord] = []
    total = sum(len(trials[user.name]) for user in users)
    for user in users:
        missing = [each for each in trials[user.name] if log.get((each.key, user.name)) is None]
        if missing:
            with UserCorpus(user, MemoizedModel(adapter), encoder, recipe, shape.cost) as corpus:
                for trial in missing:
                    progress("users' sessions", len(records) + trials[user.name].index(trial), total)
                    log.add(_run_session(trial, corpus, shape, _budgets(trial, user, log)))
            # A session has reference cycles, and the collector counts objects without knowing their size.
            gc.collect()
        for trial in trials[user.name]:
            record = log.get((trial.key, user.name))
            assert record is not None
            records.append(record)
    progress("users' sessions", total, total)
    return records


def _budgets(trial: Trial, user: User, log: SessionLog) -> Sequence[float | None]:
    """Return the operations allowed in each idle period: PerCache's, or None for no limit."""
    if not trial.shares_budget:
        return [None] * (len(user.questions) + 1)
    record = log.get((budget_trial(trial.answers).key, user.name))
    assert record is not None, "PerCache's session comes before those that share its budget"
    return [period.flops for period in record.idle]


def _run_session(
    trial: Trial, corpus: UserCorpus, shape: Shape, budgets: Sequence[float | None]
) -> SessionRecord:
    began = time.monotonic()
    questions = corpus.user.questions
    with UserSession(trial.system, trial.setting, corpus, trial.answers) as session:
        background = BackgroundRunner(session, shape)
        idle = [background.run(budgets[0], first=True)]
        served = []
        for number, asked in enumerate(questions, 1):
            served.append(session.ask(asked))
            if trial.later_setting is not None and number == len(questions) // 2:
                session.change(trial.later_setting)
            idle.append(background.run(budgets[number], first=False))
        stored = session.stored()
    record = SessionRecord(trial.key, corpus.user.name, tuple(served), tuple(idle), stored)
    return replace(record, took_s=time.monotonic() - began)


def _logged(request: Request, adapter: Adapter) -> dict[str, Any]:
    """Return the settings that a user's session depends on. The number of users is not among them, so that a log can grow."""
    about = {name: value for name, value in request.about.items() if name not in ("seeds", "users of a file")}
    return {**run_config(adapter), **about, "recipe": request.recipe}


def _open_log(request: Request, adapter: Adapter, shape: Shape) -> SessionLog:
    config = {
        **_logged(request, adapter),
        "operations of a row": shape.cost.per_row,
        "chunk tokens": CHUNK_TOKENS,
        "top k": TOP_K,
    }
    return ResultsLog(
        request.output,
        config,
        file=_LOG,
        version=LOG_VERSION,
        key=lambda record: record.key,
        parse=parse_session,
    )


def _open_executed_log(request: Request, adapter: Adapter, timed: Adapter) -> ExecutedLog:
    config = {
        **_logged(request, adapter),
        "shape": timed.fingerprint.name,
        "decodings": list(request.decodings),
        "every": request.execute_every,
    }
    return ResultsLog(
        request.output,
        config,
        file=_EXECUTED_LOG,
        version=_EXECUTED_VERSION,
        key=lambda record: record.key,
        parse=parse_executed,
    )


def parse_session(content: dict[str, Any]) -> SessionRecord:
    """Return a session record from its JSON values."""
    return SessionRecord(
        **content
        | {
            "served": tuple(map(_parse_question, content["served"])),
            "idle": tuple(IdlePeriod(**period) for period in content["idle"]),
            "stored": StoredTotals(**content["stored"]),
        }
    )


def _parse_question(content: dict[str, Any]) -> ServedQuestion:
    model_pass = content["model_pass"]
    return ServedQuestion(
        **content | {"model_pass": None if model_pass is None else ModelPass.parse(model_pass)}
    )


def _about(request: Request, adapter: Adapter, shape: Shape, users: Sequence[User]) -> dict[str, Any]:
    return {
        **request.about,
        "digest": adapter.fingerprint.digest,
        "users": len(users),
        "questions": sum(len(user.questions) for user in users),
        "users of ablations": min(request.ablations, len(users)),
        "users of further experiments": min(request.further, len(users)),
        "users executed": min(request.execute, len(users)),
        "questions executed": f"every {request.execute_every}",
        "earlier costs": dict(request.costs_about),
        "answers": list(request.answers),
        "decodings": list(request.decodings),
        "recipe of kvweave": request.recipe,
        "published": [system.name for system in SYSTEMS if system is not OURS],
        "embedding": TextEncoder().name,
        "chunk tokens": CHUNK_TOKENS,
        "top k": TOP_K,
        "KV bytes of a token": shape.token_bytes,
        "Q bytes of a token": shape.query_bytes,
    }
