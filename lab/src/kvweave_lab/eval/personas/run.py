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
from typing import Any, Final

from kvweave.embedding import TextEncoder
from kvweave.engine.state import Progress, no_progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.personas.background import BackgroundRunner
from kvweave_lab.eval.personas.corpus import CHUNK_TOKENS, TOP_K, MemoizedEncoder, UserCorpus
from kvweave_lab.eval.personas.costs import Costs, measure_costs
from kvweave_lab.eval.personas.model import MemoizedModel, ModelPass
from kvweave_lab.eval.personas.pricing import OperationRow, Prices, Shape, operation_rows
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
    BUDGET_TRIAL,
    OURS,
    PERCACHE,
    SYSTEMS,
    TOKEN_BY_TOKEN,
    Trial,
    ablations,
    comparison,
    scheduling,
    sweeps,
)
from kvweave_lab.eval.personas.users import User
from kvweave_lab.results_log import ResultsLog, run_config

LOG_VERSION: Final = 6
"""Version of the meaning of a session; raise it when older sessions would mislead."""
_LOG: Final = "sessions.jsonl"
_TOKEN_BY_TOKEN: Final = Trial("systems", TOKEN_BY_TOKEN.name, TOKEN_BY_TOKEN)

SessionLog = ResultsLog[tuple[str, str], SessionRecord]
"""Session records by trial and user."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare.

    Attributes:
        users: generated, or read from files.
        about: describes the users; a results log holds sessions of one kind of users only.
        further: number of users that also run ablations, sweeps and the scheduler's experiments.
        recipe: kvweave's recipe for reusing KV.
        output: folder of the sessions; None keeps them in memory.
        repeats: of each timing.
    """

    users: Sequence[User]
    about: dict[str, Any]
    further: int
    recipe: str
    output: Path | None = None
    repeats: int = 3


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
    systems = comparison()
    further = [*ablations(), *sweeps(CHUNK_TOKENS), *scheduling(CHUNK_TOKENS)]
    trials = {
        user.name: [*systems, *(further if number < request.further else ())]
        for number, user in enumerate(users)
    }
    with _open_log(request, adapter, shape) as log:
        with UserCorpus(users[0], MemoizedModel(adapter), encoder, recipe, shape.cost) as corpus:
            questions = [asked.text for asked in users[0].questions]
            costs = measure_costs(timed, corpus, questions, repeats=request.repeats, progress=progress)
            chunk_bytes = sum(len(note.text.encode()) for note in users[0].notes) / len(corpus.chunk_tokens)
            chunk_tokens = statistics.fmean(corpus.chunk_tokens)
        records = run_sessions(users, trials, log, adapter, encoder, recipe, shape, progress)
    sessions: dict[str, list[SessionRecord]] = {}
    for record in records:
        sessions.setdefault(record.trial, []).append(record)
    sessions[_TOKEN_BY_TOKEN.key] = sessions[f"systems/{OURS.name}"]
    prices = Prices(costs, shape)
    in_table_order = sorted(systems, key=lambda trial: SYSTEMS.index(trial.system))
    return Comparison(
        about=_about(request, adapter, shape, users),
        costs=costs,
        systems=tuple(system_rows([*in_table_order, _TOKEN_BY_TOKEN], sessions, prices)),
        pairs=tuple(pair_rows([*SYSTEMS, TOKEN_BY_TOKEN], sessions, prices)),
        users=tuple(user_rows(SYSTEMS, sessions, prices)),
        further=tuple(system_rows(further, sessions, prices)),
        scheduler=tuple(
            scheduler_rows([trial for trial in further if trial.experiment == "scheduler"], sessions, prices)
        ),
        operations=tuple(
            operation_rows(sessions[f"systems/{PERCACHE.name}"], PERCACHE, prices, chunk_tokens, chunk_bytes)
        ),
    )


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
        trials: by user name; BUDGET_TRIAL is among them if one of them shares its budget.
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
    record = log.get((BUDGET_TRIAL.key, user.name))
    assert record is not None, "PerCache's session comes before those that share its budget"
    return [period.flops for period in record.idle]


def _run_session(
    trial: Trial, corpus: UserCorpus, shape: Shape, budgets: Sequence[float | None]
) -> SessionRecord:
    began = time.monotonic()
    questions = corpus.user.questions
    with UserSession(trial.system, trial.setting, corpus) as session:
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


def _open_log(request: Request, adapter: Adapter, shape: Shape) -> SessionLog:
    config = {
        **run_config(adapter),
        **request.about,
        "recipe": request.recipe,
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
    if model_pass is not None:
        model_pass = ModelPass(**model_pass | {"draft_passes": tuple(model_pass["draft_passes"])})
    return ServedQuestion(**content | {"model_pass": model_pass})


def _about(request: Request, adapter: Adapter, shape: Shape, users: Sequence[User]) -> dict[str, Any]:
    return {
        **request.about,
        "digest": adapter.fingerprint.digest,
        "users": len(users),
        "questions": sum(len(user.questions) for user in users),
        "users of further experiments": min(request.further, len(users)),
        "recipe of kvweave": request.recipe,
        "published": [system.name for system in SYSTEMS if system is not OURS],
        "embedding": TextEncoder().name,
        "chunk tokens": CHUNK_TOKENS,
        "top k": TOP_K,
        "KV bytes of a token": shape.token_bytes,
        "Q bytes of a token": shape.query_bytes,
    }
