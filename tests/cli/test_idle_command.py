"""Working ahead through the real command."""

import signal
import time

import pytest

from support.processes import Program

pytestmark = pytest.mark.usefixtures("chunks_computed_once")

GLORRIC = "What is the password of Glorric?"
AGAIN = "The password of Glorric?"


def test_idle_time_answers_what_waits_predicts_and_tells_what_it_earned(command, indexed_home):
    command("ask", GLORRIC)
    command("ask", AGAIN)
    done = command.json("idle", "--stride", "2")
    assert done["jobs"]["answers"] == 1
    assert done["jobs"]["abstract"] >= 1
    assert done["flops"] > 0
    assert done["ended"] == "nothing is left to do"
    assert command.json("ask", AGAIN)["plan"]["cache_hit"]["question"] == AGAIN

    stats = command.json("cache", "stats")
    assert stats["answers"]["given"] == 2
    assert sum(stats["predictions"]["predicted"].values()) == done["jobs"].get("population", 0)
    assert stats["predictions"]["given_per_question"] == 0
    assert stats["idle"]["answers"]["jobs"] == 1
    told = command("cache", "stats").stdout
    assert "answers: " in told
    assert "background work: " in told

    status = command.json("idle", "--status")
    assert status["dropped"] == stats["predictions"]["reasons"]

    again = command("idle").stdout
    assert "nothing is left to do" in again


def test_a_budget_and_a_stride_that_cannot_be_are_named(command, indexed_home):
    assert (
        "prediction_stride is 9; it must be between 1 and 5"
        in command("idle", "--stride", "9", code=1).stderr
    )
    refused = command("idle", code=1, KVWEAVE_IDLE_POWER="solar").stderr
    assert "idle_power is 'solar'; choose mains" in " ".join(refused.split())
    spent = command("idle", KVWEAVE_IDLE_SECONDS_PER_DAY="0").stdout
    assert "today's 0 s are spent" in spent


def test_the_status_is_shown(command, indexed_home):
    told = " ".join(command("idle", "--status", KVWEAVE_IDLE_SECONDS_PER_DAY="0").stdout.split())
    assert "made: 0 answers" in told
    assert "now: today's 0 s are spent (idle_seconds_per_day)" in told
    found = command.json("idle", "--status")
    assert (found["waiting"], found["worth"]["hits"]) == (0, 0)
    assert found["seconds_per_day"] == 3600
    assert (found["dropped"], found["summaries_dropped"]) == ({}, {})
    assert {each["name"] for each in found["conditions"]} >= {"power", "memory pressure", "daily budget"}
    refused = command("idle", "--watch", "--status", code=1).stderr
    assert "--watch and --status do not go together" in refused


def test_without_a_knowledge_base_it_is_refused(command):
    assert "there is no knowledge base" in command("idle", code=1).stderr


def test_watching_works_until_it_is_interrupted(command, indexed_home):
    command("ask", GLORRIC)
    command("ask", AGAIN)
    environment = command.environment | {"KVWEAVE_IDLE_QUIET_S": "0.2"}
    with Program(["-m", "kvweave", "idle", "--watch", "--quiet"], environment) as watching:
        until = time.monotonic() + 90
        while "answers" not in command.json("cache", "stats")["idle"] and time.monotonic() < until:
            time.sleep(0.5)
        watching.send_signal(signal.SIGINT)
        told = watching.communicate(timeout=60)[1]
    assert watching.returncode == 130
    assert "interrupted" in told
    assert command.json("ask", AGAIN)["plan"]["cache_hit"]["question"] == AGAIN
