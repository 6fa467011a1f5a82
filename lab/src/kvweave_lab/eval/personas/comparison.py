"""The whole evaluation: users, what operations take, every session, and the rows made of them."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvweave.embedding import TextEncoder
from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave_lab.eval.journal import LineJournal
from kvweave_lab.eval.personas.costs import Costs, measure_costs
from kvweave_lab.eval.personas.lives import Sessions, live
from kvweave_lab.eval.personas.notebook import CHUNK_TOKENS, TOP_K, Notebook, RememberedEncoder
from kvweave_lab.eval.personas.operations import OperationRow, operation_rows
from kvweave_lab.eval.personas.passes import Pass
from kvweave_lab.eval.personas.people import User
from kvweave_lab.eval.personas.pricing import Prices
from kvweave_lab.eval.personas.reading import Reader
from kvweave_lab.eval.personas.scheduler import SchedulerRow, scheduler_rows
from kvweave_lab.eval.personas.served import Held, IdleSpell, Served, Session
from kvweave_lab.eval.personas.shape import Shape
from kvweave_lab.eval.personas.summary import PairRow, SystemRow, UserRow, pair_rows, system_rows, user_rows
from kvweave_lab.eval.personas.systems import OURS, PERCACHE, SYSTEMS, TOKEN_BY_TOKEN
from kvweave_lab.eval.personas.trials import Trial, ablations, comparison, scheduling, sweeps
from kvweave_lab.eval.subject import subject_of

JOURNAL_VERSION: Final = 5
"""What a session means; raised with every change after which older ones would mislead."""
_FILE: Final = "sessions.jsonl"
_TOKEN_BY_TOKEN: Final = Trial("systems", TOKEN_BY_TOKEN.name, TOKEN_BY_TOKEN)


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare.

    Attributes:
        users: generated, or read from files.
        about: what the users are, for the record: a journal holds sessions of one kind of users only.
        further: how many of the users also go through ablations, sweeps and the scheduler's experiments.
        recipe: by which our system reuses KV.
        output: where sessions are kept; None for nowhere.
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
    """Everything that came out; `about` says of what."""

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
    progress: Progress = lambda stage, done, total: None,
) -> Comparison:
    """Run what the journal lacks, and sum everything up.

    Args:
        adapter: the model that answers.
        timed: a model in the shape that latency is replayed on.
        request: what to compare.
        progress: told stage, units done and units in all.

    Raises InvalidRequest without users, for a user without questions, and for a folder of other sessions; UnknownRecipe.
    """
    users = list(request.users)
    if not users or not all(user.questions and user.notes for user in users):
        raise InvalidRequest("every user needs notes and questions, and there must be a user at least")
    recipe, encoder, shape = recipe_named(request.recipe), RememberedEncoder(), Shape.of(timed)
    systems, further = comparison(), _further()
    trials = {
        user.name: [*systems, *(further if number < request.further else ())]
        for number, user in enumerate(users)
    }
    with _journal(request, adapter, shape) as journal:
        with Notebook(users[0], Reader(adapter), encoder, recipe, shape.cost) as notebook:
            questions = [asked.text for asked in users[0].questions]
            costs = measure_costs(timed, notebook, questions, repeats=request.repeats, progress=progress)
            chunk_bytes = sum(len(note.text.encode()) for note in users[0].notes) / len(notebook.chunk_tokens)
            chunk_tokens = statistics.fmean(notebook.chunk_tokens)
        sessions = live(users, trials, journal, adapter, encoder, recipe, shape, progress)
    lived: dict[str, list[Session]] = {}
    for session in sessions:
        lived.setdefault(session.trial, []).append(session)
    lived[_TOKEN_BY_TOKEN.key] = lived[f"systems/{OURS.name}"]
    prices = Prices(costs, shape)
    return Comparison(
        about=_about(request, adapter, shape, users),
        costs=costs,
        systems=tuple(system_rows([*sorted(systems, key=_place), _TOKEN_BY_TOKEN], lived, prices)),
        pairs=tuple(pair_rows([*SYSTEMS, TOKEN_BY_TOKEN], lived, prices)),
        users=tuple(user_rows(SYSTEMS, lived, prices)),
        further=tuple(system_rows(further, lived, prices)),
        scheduler=tuple(scheduler_rows([t for t in further if t.experiment == "scheduler"], lived, prices)),
        operations=tuple(
            operation_rows(lived[f"systems/{PERCACHE.name}"], PERCACHE, prices, chunk_tokens, chunk_bytes)
        ),
    )


def _place(trial: Trial) -> int:
    """Where a table lists it; the trial that sets the budget runs first."""
    return SYSTEMS.index(trial.system)


def _further() -> list[Trial]:
    return [*ablations(), *sweeps(CHUNK_TOKENS), *scheduling(CHUNK_TOKENS)]


def _journal(request: Request, adapter: Adapter, shape: Shape) -> Sessions:
    subject = {
        **subject_of(adapter),
        **request.about,
        "recipe": request.recipe,
        "operations of a row": shape.cost.per_row,
        "chunk tokens": CHUNK_TOKENS,
        "top k": TOP_K,
    }
    return LineJournal(
        request.output,
        subject,
        file=_FILE,
        version=JOURNAL_VERSION,
        key=lambda session: session.key,
        read=_session,
    )


def _session(content: dict[str, Any]) -> Session:
    served = [
        Served(**each | {"took": None if each["took"] is None else _pass(each["took"])})
        for each in content["served"]
    ]
    idle = [IdleSpell(**spell) for spell in content["idle"]]
    return Session(
        **content | {"served": tuple(served), "idle": tuple(idle), "held": Held(**content["held"])}
    )


def _pass(content: dict[str, Any]) -> Pass:
    return Pass(**content | {"checks": tuple(content["checks"])})


def _about(request: Request, adapter: Adapter, shape: Shape, users: Iterable[User]) -> dict[str, Any]:
    everybody = list(users)
    return {
        **request.about,
        "digest": adapter.fingerprint.digest,
        "users": len(everybody),
        "questions": sum(len(user.questions) for user in everybody),
        "users of further experiments": min(request.further, len(everybody)),
        "recipe of kvweave": request.recipe,
        "published": [system.name for system in SYSTEMS if system is not OURS],
        "embedding": TextEncoder().name,
        "chunk tokens": CHUNK_TOKENS,
        "top k": TOP_K,
        "KV bytes of a token": shape.token_bytes,
        "Q bytes of a token": shape.query_bytes,
    }
