"""Every trial with every user, in order of time; what a journal has already is not run again.

Trials of one user run one after the other over one notebook, so that what the model reads for one is there for the next.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvweave.embedding import TextEncoder
from kvweave.engine.state import Progress
from kvweave.models.adapter import Adapter
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.journal import LineJournal
from kvweave_lab.eval.personas.idle_time import BackgroundRunner
from kvweave_lab.eval.personas.notebook import Notebook
from kvweave_lab.eval.personas.people import User
from kvweave_lab.eval.personas.reading import Reader
from kvweave_lab.eval.personas.served import Session
from kvweave_lab.eval.personas.shape import Shape
from kvweave_lab.eval.personas.trials import MEASURED, Trial
from kvweave_lab.eval.personas.user_session import UserSession

Sessions = LineJournal[tuple[str, str], Session]


def live(
    users: Sequence[User],
    trials: Mapping[str, Sequence[Trial]],
    journal: Sessions,
    adapter: Adapter,
    encoder: TextEncoder,
    recipe: Recipe,
    shape: Shape,
    progress: Progress = lambda stage, done, total: None,
) -> list[Session]:
    """All sessions, user by user.

    Args:
        users: who asks.
        trials: by the user's name; where one shares PerCache's budget, MEASURED is among them.
        journal: where sessions are looked up first and written to.
        adapter: the model that answers.
        encoder: for retrieval and matching.
        recipe: by which KV is reused anywhere.
        shape: that operations are counted for.
        progress: told the number of sessions.
    """
    sessions: list[Session] = []
    total = sum(len(trials[user.name]) for user in users)
    for user in users:
        lacking = [each for each in trials[user.name] if journal.get((each.key, user.name)) is None]
        if lacking:
            with Notebook(user, Reader(adapter), encoder, recipe, shape.cost) as notebook:
                for trial in lacking:
                    progress("users' sessions", len(sessions) + trials[user.name].index(trial), total)
                    journal.add(_lived(trial, notebook, shape, _budgets(trial, user, journal)))
            # A session's parts refer to one another, and the collector, which counts objects, does not see how large they are.
            gc.collect()
        for trial in trials[user.name]:
            session = journal.get((trial.key, user.name))
            assert session is not None
            sessions.append(session)
    progress("users' sessions", total, total)
    return sessions


def _budgets(trial: Trial, user: User, journal: Sessions) -> Sequence[float | None]:
    """Operations for each spell of idle time: as many as PerCache took there, or as many as it takes."""
    if not trial.shares_budget:
        return [None] * (len(user.questions) + 1)
    measured = journal.get((MEASURED.key, user.name))
    assert measured is not None, "PerCache's session comes before those that share its budget"
    return [spell.flops for spell in measured.idle]


def _lived(trial: Trial, notebook: Notebook, shape: Shape, budgets: Sequence[float | None]) -> Session:
    began = time.monotonic()
    questions = notebook.user.questions
    with UserSession(trial.system, trial.setting, notebook) as session:
        idle = BackgroundRunner(session, shape)
        spells = [idle.spend(budgets[0], first=True)]
        served = []
        for number, asked in enumerate(questions, 1):
            served.append(session.ask(asked))
            if trial.then is not None and number == len(questions) // 2:
                session.change(trial.then)
            spells.append(idle.spend(budgets[number], first=False))
        held = session.held()
    done = Session(trial.key, notebook.user.name, tuple(served), tuple(spells), held)
    return replace(done, took_s=time.monotonic() - began)
