"""When background work may run: on mains, at low load, within the day's budget; each reason is named."""

import math
import threading

import pytest

from kvweave.background import conditions as idle_conditions
from kvweave.background import runner as background
from kvweave.background.conditions import (
    MachineState,
    OwnLoad,
    budget_condition,
    conditions,
    first_reason,
    memory_pressure,
)
from kvweave.background.prediction import QuestionPredictor
from kvweave.config import IdleConfig
from kvweave.state.background_budget import Spent, Worth

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"
LIMITS = {"idle_power": "any", "idle_load": 0.5, "idle_memory_pressure": 10.0}
CALM = MachineState(True, 0.1, 0.0)
UNKNOWN = MachineState(True, None, None)


def test_a_calm_machine_and_one_that_tells_nothing_may_work():
    for state in (CALM, UNKNOWN):
        assert first_reason(conditions(IdleConfig(), state)) == ""
    told = [each.state for each in conditions(IdleConfig(), UNKNOWN)]
    assert told == ["mains", *["not reported by this system"] * 2]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (MachineState(False, 0.1, 0.0), "running on battery (idle_power is mains)"),
        (
            MachineState(True, 0.9, 0.0),
            "the load of other programs per core is 0.9, above 0.5 (idle_load)",
        ),
        (
            MachineState(True, 0.1, 42.0),
            "the memory pressure is 42 %, above 10 % (idle_memory_pressure)",
        ),
    ],
)
def test_each_obstacle_is_named_and_its_setting_moves_it(state, reason):
    assert first_reason(conditions(IdleConfig(), state)) == reason
    lenient = IdleConfig(idle_power="any", idle_load=9, idle_memory_pressure=100)
    assert first_reason(conditions(lenient, state)) == ""


def test_the_budget_is_a_condition():
    limited = IdleConfig(idle_seconds_per_day=60)
    assert budget_condition(limited, Spent(1, 59, 1e11)).reason == ""
    assert (
        budget_condition(limited, Spent(1, 60, 1e11)).reason
        == "today's 60 s are spent (idle_seconds_per_day)"
    )


def test_work_that_nobody_asked_for_ends_after_an_hour_a_day_unless_the_settings_say_otherwise():
    spent = Spent(1, 3600, 0)
    assert budget_condition(IdleConfig(), spent).reason == "today's 3600 s are spent (idle_seconds_per_day)"
    assert budget_condition(IdleConfig(), Spent(1, 3599, 0)).reason == ""
    assert budget_condition(IdleConfig(), spent, asked_for=True).reason == ""
    assert budget_condition(IdleConfig(idle_seconds_per_day=60), spent, asked_for=True).reason
    for more in (4000.0, math.inf):
        assert budget_condition(IdleConfig(idle_seconds_per_day=more), spent).reason == ""


def test_an_hour_a_day_is_told_and_kept(open_kb, documents, monkeypatch):
    monkeypatch.setattr(background, "machine_state", lambda own: CALM)
    monkeypatch.setattr(QuestionPredictor, "next_job", lambda predictor: None)
    base = open_kb(answer_limit_bytes=10**7, **LIMITS)
    base.add(documents)
    base.ask(GLORRIC)
    base.ask("The password of Glorric?")
    base.background_budget.add("answers", Spent(1, 3601, 0))
    status = base.idle_status(CALM)
    assert (status.seconds_per_day, status.reasons) == (
        3600,
        ("today's 3600 s are spent (idle_seconds_per_day)",),
    )
    unasked = base.idle(low_load=True)
    assert (unasked.jobs, unasked.ended) == ({}, "today's 3600 s are spent (idle_seconds_per_day)")
    assert base.idle().jobs == {"answers": 1}, "somebody asked for it"


def test_background_work_does_not_count_its_own_load():
    own, processor_s = OwnLoad(), 0.0
    assert own.update(0.0, 5.0) == 0
    for second in range(1, 301):
        processor_s += 2  # two threads, as the load average counts them
        load = own.update(float(second), 5.0 + processor_s)
    assert load == pytest.approx(2, rel=0.01)
    assert own.update(301.0, 5.0 + processor_s) < load


def test_the_pressure_is_read_as_linux_writes_it(tmp_path):
    path = tmp_path / "memory"
    path.write_text(
        "some avg10=12.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=3.00 avg60=0 avg300=0 total=1\n"
    )
    assert memory_pressure(path) == 12.5
    for text in ("", "some", "some avg10=? total=1\n"):
        path.write_text(text)
        assert memory_pressure(path) is None
    assert memory_pressure(tmp_path / "none") is None


def test_what_idle_work_did_and_was_worth_is_told(open_kb, documents, monkeypatch):
    monkeypatch.setattr(QuestionPredictor, "next_job", lambda predictor: None)
    base = open_kb(answer_limit_bytes=10**7, **LIMITS, idle_seconds_per_day=900.0)
    base.add(documents)
    base.ask(GLORRIC)
    base.ask("The password of Glorric?")
    before = base.idle_status(CALM)
    assert (before.waiting, before.worth.entries, before.reasons) == (1, 0, ())
    busy = MachineState(True, 3.0, 0.0)
    monkeypatch.setattr(background, "machine_state", lambda own: busy)
    assert "load of other programs" in base.idle(low_load=True).ended
    assert base.idle_status(busy).reasons == (
        "the load of other programs per core is 3, above 0.5 (idle_load)",
    )
    monkeypatch.setattr(background, "machine_state", lambda own: CALM)
    base.idle(low_load=True)
    made = base.idle_status(CALM)
    assert (made.jobs_today, made.waiting) == ({"answers": 1}, 0)
    assert (made.worth.entries, made.worth.hits) == (1, 0)
    assert 0 < made.spent_today.seconds <= 900
    base.ask(GLORRIC)  # its user waited for that answer
    base.ask("The password of Glorric?")
    earned = base.idle_status(CALM)
    assert earned.worth_today == earned.worth
    assert earned.worth.hits == 1
    assert 0 < earned.worth.saved_s <= made.spent.seconds
    base.background_budget.add_worth(Worth(kv_bytes=7))
    assert base.background_budget.worth(today=True).kv_bytes == made.worth.kv_bytes + 7


def test_watching_waits_while_the_machine_is_busy(open_kb, documents, monkeypatch):
    base = open_kb(answer_limit_bytes=10**7, **LIMITS, idle_quiet_s=0.0)
    base.add(documents)
    base.ask(GLORRIC)
    base.ask("The password of Glorric?")
    stop, looked = threading.Event(), []

    def busy(own):
        looked.append(own)
        stop.set()
        return MachineState(True, 3.0, 0.0)

    monkeypatch.setattr(background, "machine_state", busy)
    base.watch_idle(stop)
    assert len(base.answers.pending()) == 1
    assert len(looked) == 1
    assert isinstance(looked[0], idle_conditions.OwnLoad)
