"""What is tried: a system with its settings, and which settings change while it runs. Runs nothing."""

from dataclasses import dataclass, field, replace
from typing import Final

from kvweave.config import AnswersConfig, PredictionConfig
from kvweave_lab.eval.personas.systems import OURS, PERCACHE, RAGCACHE_MEANCACHE, SYSTEMS, System, without

_ANSWERS, _PREDICTION = AnswersConfig(), PredictionConfig()


@dataclass(frozen=True, slots=True)
class Setting:
    """What PerCache configures.

    Attributes:
        threshold: τ.
        stride: questions predicted at once.
        cutoff: the highest τ at which answers of predicted questions are computed ahead.
        limit_tokens: cap of the stored KV, in tokens; None for none.
        schedules: whether the scheduler is on (§4.3): without it every predicted question is prefilled and decoded, and
            nothing is converted later.
    """

    threshold: float = _ANSWERS.answer_threshold
    stride: int = _PREDICTION.prediction_stride
    cutoff: float = _PREDICTION.decode_cutoff
    limit_tokens: int | None = None
    schedules: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """A system under settings, which may change before the middle question.

    Attributes:
        experiment: which table or figure it belongs to.
        name: within the experiment.
        system: that is tried.
        setting: at the start.
        then: from the middle question on; None for no change.
        shares_budget: whether its idle time may take no more operations than PerCache's did around the same question.
    """

    experiment: str
    name: str
    system: System
    setting: Setting = field(default_factory=Setting)
    then: Setting | None = None
    shares_budget: bool = False

    @property
    def key(self) -> str:
        """Names it among all trials."""
        return f"{self.experiment}/{self.name}"


MEASURED: Final = Trial("systems", PERCACHE.name, PERCACHE)
"""The trial whose idle time sets the budget of the others."""

THRESHOLDS: Final = tuple(round(0.6 + 0.05 * step, 2) for step in range(8))
STRIDES: Final = (1, 2, 3, 4, 5)
CHUNKS: Final = (6, 12, 24, 48)
"""Storage limits of the sweep, in chunks: a user has about 20, and paths multiply them."""


def comparison() -> list[Trial]:
    """Every system; the one that sets the budget first."""
    others = [
        Trial("systems", system.name, system, shares_budget=system.foresees != "nothing")
        for system in SYSTEMS
        if system is not PERCACHE
    ]
    return [MEASURED, *others]


def ablations() -> list[Trial]:
    """PerCache and ours less one part each, at two thresholds (§5.6)."""
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
    """Stride, threshold and storage limit (§5.7), of PerCache and of ours; the threshold's without the scheduler, which
    would leave out answers above its cutoff."""
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
    """The three experiments with PerCache's scheduler (§5.5), each beside the same without it."""
    low, high = Setting(threshold=0.85), Setting(threshold=0.9)
    little = Setting(limit_tokens=CHUNKS[0] * chunk_tokens)
    much = Setting(limit_tokens=CHUNKS[-1] * chunk_tokens)
    changes = {"τ rises": (low, high), "τ falls": (high, low), "storage grows": (little, much)}
    return [
        Trial("scheduler", f"{name}, {said}", PERCACHE, _with(first, on), _with(then, on))
        for name, (first, then) in changes.items()
        for said, on in (("with", True), ("without", False))
    ]


def _with(setting: Setting, schedules: bool) -> Setting:
    return replace(setting, schedules=schedules)
