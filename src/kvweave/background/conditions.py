"""Whether this is a time for background work: power, load, memory pressure; and the status of that work, its cost and its benefit.

What the system does not tell is no obstacle, and says so. Loads no model.
"""

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kvweave.answer_cache.predictions import PredictionCounts
from kvweave.config import DEFAULT_IDLE_SECONDS_PER_DAY, IdleConfig
from kvweave.state.background_budget import Spent, Worth, sum_of
from kvweave.state.knowledge_base_state import KnowledgeBaseState

_PRESSURE: Final = Path("/proc/pressure/memory")
_LOAD_S: Final = 60.0
"""The time constant of the load average that is read, in seconds."""


@dataclass(frozen=True, slots=True)
class MachineState:
    """What the machine says; None where it does not.

    Attributes:
        on_mains: whether it runs on mains power; True without a battery.
        load: threads of other programs that run or wait to run, per core, on average over a minute.
        memory_pressure: percent of the last ten seconds in which a program waited for memory.
    """

    on_mains: bool
    load: float | None
    memory_pressure: float | None


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: its name, what the machine says about it, and why it forbids work now; empty if it does not."""

    name: str
    state: str
    reason: str


class OwnLoad:
    """This process's part of the machine's load average, so that background work does not stop itself."""

    def __init__(self) -> None:
        self._load = 0.0
        self._seen: tuple[float, float] | None = None

    def update(self, now_s: float, processor_s: float) -> float:
        """Return the part in threads. `processor_s` is the processor time used so far; both are in seconds."""
        if self._seen is not None and now_s > self._seen[0]:
            passed_s = now_s - self._seen[0]
            share = math.exp(-passed_s / _LOAD_S)
            self._load = self._load * share + (processor_s - self._seen[1]) / passed_s * (1 - share)
        self._seen = now_s, processor_s
        return self._load


def machine_state(own: OwnLoad) -> MachineState:
    """Read the state of this machine; `own` is this process's part of the load."""
    times = psutil.Process().cpu_times()
    own_load = own.update(time.monotonic(), times.user + times.system)
    load = None
    with suppress(OSError, AttributeError):
        load = max(0.0, psutil.getloadavg()[0] - own_load) / (os.cpu_count() or 1)
    return MachineState(_on_mains(), load, memory_pressure())


def conditions(config: IdleConfig, machine: MachineState) -> tuple[Condition, ...]:
    """Return the conditions that the settings make for work that no user has just asked for."""
    power = "mains" if machine.on_mains else "battery"
    on_battery = config.idle_power == "mains" and not machine.on_mains
    return (
        Condition("power", power, "running on battery (idle_power is mains)" if on_battery else ""),
        _at_most("load of other programs per core", machine.load, config.idle_load, "idle_load"),
        _at_most(
            "memory pressure",
            machine.memory_pressure,
            config.idle_memory_pressure,
            "idle_memory_pressure",
            " %",
        ),
    )


def power_condition(config: IdleConfig) -> Condition:
    """Return the condition that holds even for work that a user has asked for."""
    return conditions(config, MachineState(_on_mains(), None, None))[0]


def seconds_per_day(config: IdleConfig, *, asked_for: bool = False) -> float | None:
    """Return the daily budget of seconds; None without a limit, the default for work that a user has asked for."""
    seconds = config.idle_seconds_per_day
    if seconds is None and not asked_for:
        return DEFAULT_IDLE_SECONDS_PER_DAY
    return None if seconds == math.inf else seconds


def budget_condition(config: IdleConfig, spent: Spent, *, asked_for: bool = False) -> Condition:
    """Return the condition that today's work is within the daily budget; `asked_for` is whether a user asked for the work."""
    seconds = seconds_per_day(config, asked_for=asked_for)
    state, reason = f"{spent.seconds:.3g} s spent today, no limit (idle_seconds_per_day)", ""
    if seconds is not None:
        state = f"{spent.seconds:.3g} s of {seconds:g} s spent today (idle_seconds_per_day)"
    if seconds is not None and spent.seconds >= seconds:
        reason = f"today's {seconds:g} s are spent (idle_seconds_per_day)"
    return Condition("daily budget", state, reason)


def first_reason(found: Sequence[Condition]) -> str:
    """Return the first reason not to work now, or an empty string."""
    return next((each.reason for each in found if each.reason), "")


def memory_pressure(path: Path = _PRESSURE) -> float | None:
    """Return the percent of the last ten seconds in which a program waited for memory; None outside Linux."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            kind, average, *_ = line.split()
            if kind == "some":
                return float(average.removeprefix("avg10="))
    return None


def _at_most(name: str, value: float | None, limit: float, setting: str, unit: str = "") -> Condition:
    if value is None:
        return Condition(name, "not reported by this system", "")
    state = f"{value:.3g}{unit} (at most {limit:g}{unit}, {setting})"
    above = f"the {name} is {value:.3g}{unit}, above {limit:g}{unit} ({setting})"
    return Condition(name, state, above if value > limit else "")


def _on_mains() -> bool:
    """Return False only if a battery says that it is in use."""
    sensors = getattr(psutil, "sensors_battery", None)  # not on every platform
    battery = sensors() if sensors is not None else None
    return battery is None or battery.power_plugged is not False


@dataclass(frozen=True, slots=True)
class IdleStatus:
    """Cost and benefit of background work, and whether it may run now.

    Attributes:
        day: today by the local calendar, such as 2026-01-31.
        spent_today: what it cost today, and `spent` in all.
        seconds_per_day: the daily budget of such work as `conditions` are for; None without a limit.
        jobs_today: finished jobs of today by kind.
        worth_today: what was made and of use today, and `worth` in all.
        waiting: questions that wait for an answer.
        seconds: of work so far, by kind.
        predictions: what predicted questions were worth so far.
        promoted: questions that got the answer to a stored one ahead of time, and `promoted_given` answers given from them.
        dropped: predicted questions that were not worth an answer, by reason.
        summaries_dropped: summaries that questions are not predicted from, by reason.
        conditions: what must hold for work that no user has just asked for.
    """

    day: str
    spent_today: Spent
    spent: Spent
    seconds_per_day: float | None
    jobs_today: dict[str, int]
    worth_today: Worth
    worth: Worth
    waiting: int
    seconds: dict[str, float]
    predictions: PredictionCounts
    promoted: int
    promoted_given: int
    dropped: dict[str, int]
    summaries_dropped: dict[str, int]
    conditions: tuple[Condition, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no work is done now; empty if it may be."""
        return tuple(each.reason for each in self.conditions if each.reason)


def idle_status(
    state: KnowledgeBaseState, config: IdleConfig, machine: MachineState | None = None
) -> IdleStatus:
    """Return the status of a knowledge base's background work; `machine` is that of this one if it is not given."""
    budget, predictions = state.background_budget, state.predictions
    today = budget.totals(today=True)
    spent_today, spent, answers = sum_of(today.values()), budget.totals(), state.answers.totals()
    machine = machine_state(OwnLoad()) if machine is None else machine
    return IdleStatus(
        time.strftime("%Y-%m-%d"),
        spent_today,
        sum_of(spent.values()),
        seconds_per_day(config),
        {kind: spent.jobs for kind, spent in today.items()},
        budget.worth(today=True),
        budget.worth(),
        answers.waiting,
        {kind: each.seconds for kind, each in spent.items()},
        predictions.predicted.counts(),
        answers.promoted,
        answers.promoted_given,
        predictions.predicted.totals().reasons,
        predictions.summary.drops(),
        (*conditions(config, machine), budget_condition(config, spent_today)),
    )
