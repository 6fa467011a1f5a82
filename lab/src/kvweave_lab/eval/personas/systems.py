"""The systems that are compared, and the trials: a system with its settings.

A system is a combination of shared parts: cached answers, stored KV, and prediction at idle time. Definitions are
PerCache's (§5.2) where it compares with a system; the parts themselves are the product's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from kvweave.config import AnswersConfig, PredictionConfig

Reuse: TypeAlias = Literal["none", "path", "anywhere"]
"""Chunk KV is always computed, reused after exactly the same chunks (RAGCache's tree), or reused at any position."""
Matching: TypeAlias = Literal["none", "near", "same"]
"""Two questions share an answer never, if their vectors are near (cosine ≥ τ), or if they also ask the same."""
PredictionSource: TypeAlias = Literal["nothing", "notes", "summary"]
"""Questions are not predicted, predicted from raw chunks, or from a summary of them and from earlier questions."""
Projections: TypeAlias = Literal["KV", "QKV"]
"""The projections that projection reuse skips for tokens with stored KV."""
Answers: TypeAlias = Literal["short", "long"]
"""Replies of a few words, as the reference model gives them, or of 60 to 150 tokens around those (`wording.py`)."""
ANSWERS: Final[tuple[Answers, ...]] = ("short", "long")
Source: TypeAlias = Literal["asked", "predicted"]
"""The questions that fill a cache: the user's, or predicted ones."""


@dataclass(frozen=True, slots=True)
class System:
    """One system.

    Attributes:
        name: in tables.
        kv: how stored KV is reused.
        fills_kv: questions whose KV is stored.
        matching: when a cached answer is given.
        fills_answers: questions whose answers are cached.
        predicts_from: source of predicted questions at idle time.
        projections: skipped by projection reuse (table A).
    """

    name: str
    kv: Reuse = "none"
    fills_kv: frozenset[Source] = frozenset()
    matching: Matching = "none"
    fills_answers: frozenset[Source] = frozenset()
    predicts_from: PredictionSource = "nothing"
    projections: Projections = "KV"


_ASKED: Final[frozenset[Source]] = frozenset({"asked"})
_PREDICTED: Final[frozenset[Source]] = frozenset({"predicted"})
_BOTH: Final = _ASKED | _PREDICTED

NO_CACHE: Final = System("no cache")
RAGCACHE: Final = System("RAGCache", kv="path", fills_kv=_ASKED)
MEANCACHE: Final = System("MeanCache", matching="near", fills_answers=_ASKED)
SLEEP_TIME: Final = System(
    "Sleep-time Compute", matching="near", fills_answers=_PREDICTED, predicts_from="notes"
)
RAGCACHE_MEANCACHE: Final = replace(
    RAGCACHE, name="RAGCache + MeanCache", matching="near", fills_answers=_ASKED
)
RAGCACHE_SLEEP_TIME: Final = replace(
    SLEEP_TIME, name="RAGCache + Sleep-time", kv=RAGCACHE.kv, fills_kv=RAGCACHE.fills_kv
)
PERCACHE: Final = System(
    "PerCache",
    kv="path",
    fills_kv=_BOTH,
    matching="near",
    fills_answers=_BOTH,
    predicts_from="summary",
    projections="QKV",
)
OURS: Final = replace(PERCACHE, name="kvweave", kv="anywhere", matching="same")

SYSTEMS: Final = (
    NO_CACHE,
    RAGCACHE,
    MEANCACHE,
    SLEEP_TIME,
    RAGCACHE_MEANCACHE,
    RAGCACHE_SLEEP_TIME,
    PERCACHE,
    OURS,
)


def without(system: System, layer: Literal["answers", "KV", "prediction"]) -> System:
    """Return the system without one of its parts (PerCache §5.6)."""
    name = f"{system.name} without {layer}"
    if layer == "answers":
        return replace(system, name=name, matching="none", fills_answers=frozenset())
    if layer == "KV":
        return replace(system, name=name, kv="none", fills_kv=frozenset())
    return replace(
        system,
        name=name,
        predicts_from="nothing",
        fills_kv=system.fills_kv - _PREDICTED,
        fills_answers=system.fills_answers - _PREDICTED,
    )


_ANSWERS, _PREDICTION = AnswersConfig(), PredictionConfig()


@dataclass(frozen=True, slots=True)
class Setting:
    """PerCache's settings.

    Attributes:
        threshold: τ.
        stride: number of questions predicted at once.
        cutoff: highest τ at which answers to predicted questions are precomputed.
        limit_tokens: limit of the stored KV, in tokens; None for no limit.
        schedules: whether the scheduler is on (§4.3). Without it, every predicted question is prefilled and decoded, and
            nothing is converted later.
    """

    threshold: float = _ANSWERS.answer_threshold
    stride: int = _PREDICTION.prediction_stride
    cutoff: float = _PREDICTION.decode_cutoff
    limit_tokens: int | None = None
    schedules: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """A system with settings, which may change before the middle question.

    Attributes:
        experiment: the table or figure that it belongs to.
        name: within the experiment.
        system: the system.
        setting: at the start.
        later_setting: from the middle question on; None for no change.
        shares_budget: whether each idle period is limited to the operations of PerCache's at the same question.
        answers: how long replies are.
    """

    experiment: str
    name: str
    system: System
    setting: Setting = field(default_factory=Setting)
    later_setting: Setting | None = None
    shares_budget: bool = False
    answers: Answers = "short"

    @property
    def key(self) -> str:
        """Identifies the trial."""
        return f"{self.answers}/{self.experiment}/{self.name}"


def system_trial(system: System, answers: Answers = "short") -> Trial:
    """Return a system's trial in the comparison of all systems."""
    shares_budget = system is not PERCACHE and system.predicts_from != "nothing"
    return Trial("systems", system.name, system, shares_budget=shares_budget, answers=answers)


def budget_trial(answers: Answers = "short") -> Trial:
    """Return the trial whose idle periods set the budget of the others."""
    return system_trial(PERCACHE, answers)


THRESHOLDS: Final = tuple(round(0.6 + 0.05 * step, 2) for step in range(8))
STRIDES: Final = (1, 2, 3, 4, 5)
CHUNKS: Final = (6, 12, 24, 48)
"""Storage limits of the sweep, in chunks. A user has about 20, and each path stores its own copies."""


def comparison(answers: Answers = "short") -> list[Trial]:
    """Return a trial of every system, the one that sets the budget first."""
    others = [system_trial(system, answers) for system in SYSTEMS if system is not PERCACHE]
    return [budget_trial(answers), *others]


def with_answers(trials: Iterable[Trial], answers: Answers) -> list[Trial]:
    """Return these trials with replies of another length."""
    return [replace(trial, answers=answers) for trial in trials]


def ablations() -> list[Trial]:
    """Return PerCache and kvweave without one part each, at two thresholds (§5.6)."""
    lower = Setting(threshold=0.8)
    trials = []
    for system in (PERCACHE, OURS):
        variants = [system, *(without(system, layer) for layer in ("answers", "KV", "prediction"))]
        trials += [Trial("ablation", each.name, each) for each in variants]
        trials += [
            Trial("ablation", f"{each.name}, τ 0.8", each, lower) for each in (variants[0], variants[-1])
        ]
    return trials


def sweeps(chunk_tokens: int) -> list[Trial]:
    """Return sweeps of stride, threshold and storage limit (§5.7), for PerCache and kvweave.

    The threshold sweep is without the scheduler, which would skip answers above its cutoff.
    """
    trials = []
    for system in (PERCACHE, OURS):
        named = system.name
        trials += [Trial("stride", f"{named} {n}", system, Setting(stride=n)) for n in STRIDES]
        trials += [
            Trial("threshold", f"{named} {value:g}", system, Setting(threshold=value, schedules=False))
            for value in THRESHOLDS
        ]
    for system in (RAGCACHE_MEANCACHE, PERCACHE, OURS):
        trials += [
            Trial("storage", f"{system.name} {chunks}", system, Setting(limit_tokens=chunks * chunk_tokens))
            for chunks in CHUNKS
        ]
    return trials


def scheduling(chunk_tokens: int) -> list[Trial]:
    """Return the three experiments with PerCache's scheduler (§5.5), each with and without it."""
    low, high = Setting(threshold=0.85), Setting(threshold=0.9)
    little = Setting(limit_tokens=CHUNKS[0] * chunk_tokens)
    much = Setting(limit_tokens=CHUNKS[-1] * chunk_tokens)
    changes = {"τ rises": (low, high), "τ falls": (high, low), "storage grows": (little, much)}
    return [
        Trial(
            "scheduler",
            f"{name}, {label}",
            PERCACHE,
            replace(first, schedules=on),
            replace(later, schedules=on),
        )
        for name, (first, later) in changes.items()
        for label, on in (("with", True), ("without", False))
    ]
