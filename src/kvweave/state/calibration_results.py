"""Stores calibration results and resolves the recipe `auto`. Loads no model.

A result holds under its conditions: model, version of kvweave, settings. When many documents have changed, it stays in use until
background work or the user measures again: the other choice, UNCALIBRATED, was measured on none of the documents.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvweave.config import Config
from kvweave.database import Database
from kvweave.recipes.names import UNCALIBRATED, own_preparation
from kvweave.state.metadata import KBMetadata
from kvweave.version import __version__

MIN_QUESTIONS: Final = 8
"""The fewest questions that calibration begins with."""
DECIDING_QUESTIONS: Final = 4
"""The fewest questions after which a budget may be decided about."""
PRIOR_QUESTIONS: Final = 4
"""As many questions of the user's own as the shipped measurements of other models count."""
LEAST_SPREAD: Final = 0.05
"""Standard deviation between questions that is assumed at least: few questions may agree by chance."""
MAX_CHANGED: Final = 0.25
"""The share of chunks, of those then and now, from which on a knowledge base is calibrated again."""

_MINIMA: Final = ("calibrate_tokens",)
"""Conditions of measuring, not of using: a result is used whatever least share it was made for."""
_LATEST: Final = 8  # results that are kept, each under other conditions
_Z: Final = 1.959964  # of a normal distribution's middle 95 %
_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS calibrations (
        id INTEGER PRIMARY KEY AUTOINCREMENT, conditions TEXT NOT NULL UNIQUE, verdict TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS calibrated_documents (
        calibration INTEGER NOT NULL REFERENCES calibrations (id) ON DELETE CASCADE, version TEXT NOT NULL,
        chunks INTEGER NOT NULL, PRIMARY KEY (calibration, version)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS calibration_questions (
        conditions TEXT NOT NULL, question TEXT NOT NULL, measured TEXT NOT NULL,
        PRIMARY KEY (conditions, question)) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcome of one question under one budget, beside full attention's answer.

    Attributes:
        tokens: share of that answer's tokens that the budget chooses too, each after full attention's before it.
        first_token: whether it chooses the first one.
        answer: whether it chooses all of them, so that its answer is the same.
        passes: tokens that ran through the model per token of the prompt.
        bytes_per_token: stored bytes per token of a chunk.
    """

    tokens: float
    first_token: bool
    answer: bool
    passes: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class MeasuredQuestion:
    """Outcomes of one question by budget, with the seconds and the passes over its prompt that measuring took in all."""

    budgets: Mapping[str, Measured]
    seconds: float
    passes: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a budget over all questions, compared with the answers of full attention.

    Attributes:
        recipe: full name.
        budget: share of the stale tokens that it recomputes.
        questions: how many it was measured on: fewer than the others if they decided about it before.
        tokens: expected share of answer tokens kept, from these questions and the shipped measurements.
        tokens_interval: its 95 % interval, 0..1.
        first_tokens, answers: for how many of the questions the first token, and the answer, was the same.
        passes: tokens that ran through the model at question time per token of the prompt, on average; full attention: 1.
        bytes_per_token: stored bytes per token of a chunk, on average, at most.
        offline_passes: passes over a chunk when it is prepared, at most.
        keeps: whether the expected share is large enough.
        decided: the same where the whole interval says so; None where it does not.
    """

    recipe: str
    budget: float
    questions: int
    tokens: float
    tokens_interval: tuple[float, float]
    first_tokens: int
    answers: int
    passes: float
    bytes_per_token: float
    offline_passes: int
    keeps: bool
    decided: bool | None


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The choice of a calibration, and the measurements behind it.

    Attributes:
        recipe: full name; prefix if no budget keeps enough.
        ratio: for requests without a budget; None for the recipe's own.
        budget: the share of the stale tokens that this recomputes; 0 where it recomputes none.
        model: the model's name.
        least: the least share of answer tokens that had to be kept.
        asked, predicted, given: how many questions were asked by users, predicted, and given by the caller.
        made_at_s: seconds since 1970.
        seconds, passes: how long measuring took; passes over a question's prompt, on average.
        trials: of all budgets, as they were tried.
    """

    recipe: str
    ratio: float | None
    budget: float
    model: str
    least: float
    asked: int
    predicted: int
    given: int
    made_at_s: float
    seconds: float
    passes: float
    trials: tuple[Trial, ...]

    @property
    def questions(self) -> int:
        """Number of known questions; fewer are measured once no budget is left."""
        return self.asked + self.predicted + self.given

    @property
    def summary(self) -> str:
        """Return one line about it for users."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.made_at_s))
        kept = next((t for t in self.trials if t.recipe == self.recipe and t.budget == self.budget), None)
        if kept is None:
            none = f"{self.recipe}, since {day}: no cheaper recipe keeps {self.least:.0%} of the tokens of answers"
            measured = [trial for trial in self.trials if trial.questions]
            if not measured:
                return none
            best = max(measured, key=lambda trial: trial.tokens)
            least = math.floor(100 * best.tokens) / 100
            return f"{none}; {best.recipe} at ratio {best.budget:g} keeps {best.tokens:.1%}, which `--tokens {least:g}` would accept"
        recipe = f"{self.recipe} at ratio {self.budget:g}" if self.budget else self.recipe
        low, high = kept.tokens_interval
        return (
            f"{recipe}, since {day}: it keeps {kept.tokens:.1%} of the tokens of answers (95 % interval {low:.1%} to {high:.1%}); "
            f"of {kept.questions} answers {kept.first_tokens} begin as full attention's and {kept.answers} are the same"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The recipe that `auto` resolves to: by a calibration result, else UNCALIBRATED. `note` says why, or what has changed.

    `needed` says whether to measure now: there is no result, or too many documents have changed since.
    """

    result: CalibrationResult | None
    note: str = ""
    needed: bool = False

    @property
    def summary(self) -> str:
        """Return one line about it for users."""
        if self.result is None:
            return f"{UNCALIBRATED}, {self.note}"
        return f"{self.result.summary}{f'; {self.note}' if self.note else ''}"


def kept_share(shares: Sequence[float], prior: float) -> tuple[float, tuple[float, float]]:
    """Return the expected share of tokens kept and its 95 % interval, 0..1, from the shares of measured questions.

    The mean of the questions and of PRIOR_QUESTIONS more with the share `prior`, with a normal interval.
    """
    count = len(shares) + PRIOR_QUESTIONS
    mean = (sum(shares) + PRIOR_QUESTIONS * prior) / count
    spread = math.sqrt(sum((each - mean) ** 2 for each in shares) / max(1, len(shares) - 1))
    half = _Z * max(LEAST_SPREAD, spread) / math.sqrt(count)
    return mean, (max(0.0, mean - half), min(1.0, mean + half))


class CalibrationTable:
    """The tables of `database` that hold results and unfinished measurements, created if missing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def find(self, conditions: Mapping[str, str]) -> tuple[int, CalibrationResult] | None:
        """Return the latest result under these conditions, whatever shares it had to keep, and its row; or None."""
        wanted = _without_minima(conditions)
        rows = self._database.query("SELECT id, verdict, conditions FROM calibrations ORDER BY id DESC")
        found = (row for row in rows if _without_minima(json.loads(row[2])) == wanted)
        return next(((int(row), _result(result)) for row, result, _ in found), None)

    def latest_conditions(self) -> dict[str, str] | None:
        """Return the conditions of the latest result, or None."""
        rows = self._database.query("SELECT conditions FROM calibrations ORDER BY id DESC LIMIT 1")
        return dict(json.loads(rows[0][0])) if rows else None

    def changed_share(self, calibration: int) -> float:
        """Return the share of chunks whose document came in, went or changed since, of all chunks then and now."""
        ((came, all_now),) = self._database.query(
            """SELECT coalesce(sum(chunks * (version NOT IN (
                 SELECT version FROM calibrated_documents WHERE calibration = ?))), 0), coalesce(sum(chunks), 0) FROM documents""",
            (calibration,),
        )
        ((went,),) = self._database.query(
            """SELECT coalesce(sum(chunks), 0) FROM calibrated_documents
               WHERE calibration = ? AND version NOT IN (SELECT version FROM documents)""",
            (calibration,),
        )
        return float((came + went) / max(1, all_now + went))

    def put(self, conditions: Mapping[str, str], result: CalibrationResult) -> None:
        """Store a result for the listed documents in place of an earlier one, and delete its measurements."""
        encoded = _encoded(conditions)
        with self._database.transaction():
            self._database.execute("DELETE FROM calibrations WHERE conditions = ?", (encoded,))
            self._database.execute(
                "INSERT INTO calibrations (conditions, verdict) VALUES (?, ?)",
                (encoded, json.dumps(asdict(result))),
            )
            ((row,),) = self._database.query("SELECT max(id) FROM calibrations")
            self._database.execute(
                "INSERT INTO calibrated_documents SELECT ?, version, chunks FROM documents", (row,)
            )
            self._database.execute("DELETE FROM calibrations WHERE id <= ?", (row - _LATEST,))
            self._database.execute("DELETE FROM calibration_questions WHERE conditions = ?", (encoded,))

    def measured(self, conditions: Mapping[str, str]) -> dict[str, MeasuredQuestion]:
        """Return the measurements of an unfinished calibration under these conditions, by question."""
        rows = self._database.query(
            "SELECT question, measured FROM calibration_questions WHERE conditions = ?",
            (_encoded(conditions),),
        )
        return {question: _question(measured) for question, measured in rows}

    def add_measured(self, conditions: Mapping[str, str], question: str, measured: MeasuredQuestion) -> None:
        """Store what one question has shown."""
        self._database.execute(
            "INSERT OR REPLACE INTO calibration_questions VALUES (?, ?, ?)",
            (_encoded(conditions), question, json.dumps(asdict(measured))),
        )

    def documents_changed(self) -> None:
        """Drop unfinished measurements: they are of other documents. Call it in the transaction of the change."""
        self._database.execute("DELETE FROM calibration_questions")

    def clear(self) -> None:
        """Delete everything."""
        with self._database.transaction():
            self._database.execute("DELETE FROM calibrations")
            self.documents_changed()


class AutoRecipe:
    """Resolves the recipe `auto` in a knowledge base. `epoch` numbers the changes of the document list."""

    def __init__(
        self, table: CalibrationTable, config: Config, metadata: KBMetadata, epoch: Callable[[], int]
    ) -> None:
        self.table = table
        self._config, self._metadata, self._epoch = config, metadata, epoch
        self._changed: tuple[int, int, float] | None = None  # result, epoch, share of chunks

    def conditions(self) -> dict[str, str]:
        """Return the settings and models that a calibration result depends on, without the documents; loads no model."""
        config, metadata = self._config, self._metadata
        settings = {
            "prepare": config.prepare,
            "storage": config.store.storage,
            "auxiliary": config.model.auxiliary,
            "top_k": config.retrieval.top_k,
            "reranker": config.retrieval.reranker,
            "think": config.generation.think,
            "calibrate_tokens": config.calibration.calibrate_tokens,
        }
        return {
            "model": metadata.get("model_digest") or "",
            "kvweave": __version__,
            "system": metadata.system,
            f"preparation of {UNCALIBRATED}": own_preparation(UNCALIBRATED) or "",
            **{name: str(value) for name, value in settings.items()},
        }

    def now(self) -> Calibration:
        """Return the result in force, with a note about what has changed or is missing."""
        conditions = self.conditions()
        found = self.table.find(conditions)
        if found is None:
            return Calibration(None, self._why_none(conditions), needed=True)
        row, result = found
        changed = self._share_changed(row)
        needed = changed > MAX_CHANGED
        note = f"{changed:.0%} of the chunks have changed since" if changed else ""
        return Calibration(result, f"{note}; run `kvweave calibrate`" if needed else note, needed)

    def _share_changed(self, row: int) -> float:
        epoch = self._epoch()
        if self._changed is None or self._changed[:2] != (row, epoch):
            self._changed = row, epoch, self.table.changed_share(row)
        return self._changed[2]

    def _why_none(self, conditions: Mapping[str, str]) -> str:
        earlier = self.table.latest_conditions()
        if earlier is None:
            return "since it was not calibrated; run `kvweave calibrate`"
        if not earlier.keys() >= conditions.keys():
            return "since the latest calibration is of an earlier version; run `kvweave calibrate`"
        differing = (
            f"another {name}" if name in ("model", "system") else f"{name} {earlier.get(name)}, not {value}"
            for name, value in conditions.items()
            if earlier.get(name) != value and name not in _MINIMA
        )
        return f"since the latest calibration is for {' and '.join(differing)}; run `kvweave calibrate`"


def _without_minima(conditions: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in conditions.items() if name not in _MINIMA}


def _encoded(conditions: Mapping[str, str]) -> str:
    return json.dumps(conditions, sort_keys=True)


def _result(encoded: str) -> CalibrationResult:
    stored: dict[str, Any] = json.loads(encoded)
    trials = [
        Trial(**{**trial, "tokens_interval": tuple(trial["tokens_interval"])})
        for trial in stored.pop("trials")
    ]
    return CalibrationResult(**stored, trials=tuple(trials))


def _question(encoded: str) -> MeasuredQuestion:
    stored = json.loads(encoded)
    budgets = {key: Measured(**values) for key, values in stored.pop("budgets").items()}
    return MeasuredQuestion(budgets, **stored)


def summarised(
    recipe: str, budget: float, offline_passes: int, prior: float, measured: Sequence[Measured], least: float
) -> Trial:
    """Return the trial of a budget; `least` is the share of answer tokens to keep, `prior` as in `kept_share`."""
    tokens, bounds = kept_share([each.tokens for each in measured], prior)
    count = max(1, len(measured))
    sure = len(measured) >= DECIDING_QUESTIONS and not bounds[0] < least <= bounds[1]
    return Trial(
        recipe,
        budget,
        len(measured),
        tokens,
        bounds,
        sum(each.first_token for each in measured),
        sum(each.answer for each in measured),
        sum(each.passes for each in measured) / count,
        sum(each.bytes_per_token for each in measured) / count,
        offline_passes,
        tokens >= least,
        tokens >= least if sure else None,
    )


def chosen(trials: Iterable[Trial]) -> Trial | None:
    """Return the cheapest budget that keeps enough, or None.

    First the fewest passes at question time, in whole percent of full attention's; of those the fewest stored bytes; of
    those the fewest offline passes.
    """
    keeping = [trial for trial in trials if trial.keeps]
    return min(
        keeping,
        key=lambda trial: (round(trial.passes, 2), trial.bytes_per_token, trial.offline_passes),
        default=None,
    )
