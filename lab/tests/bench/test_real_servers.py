"""`kvweave bench serve`, `kvweave bench soak` and the tenants' timing on real servers of the reference model, briefly."""

import argparse
import json
import subprocess
from types import SimpleNamespace

import pytest

from kvweave_lab.bench.serving import first_token, processes
from kvweave_lab.bench.serving.first_token import bench_first_token
from kvweave_lab.bench.serving.processes import ServerFailed, kvweave_server
from kvweave_lab.bench.serving.soak import SoakSettings, bench_soak
from kvweave_lab.bench.serving.systems import SystemSettings
from kvweave_lab.bench.serving.traffic import ServedTraffic
from support.processes import python_program

SMALL = ("--documents", "6", "--per-request", "2", "--document-tokens", "40", "--max-new-tokens", "4")


@pytest.fixture(autouse=True)
def forked_servers(monkeypatch):
    """Servers do not import PyTorch and transformers again, which takes most of their time."""
    forked = SimpleNamespace(**vars(subprocess) | {"Popen": python_program})
    for module in (first_token, processes):
        monkeypatch.setattr(module, "subprocess", forked)


def test_servers_are_compared_under_the_same_arrivals_and_a_run_resumes(command, tmp_path):
    words = ("bench", "serve", "--system", "default", "--system", "prefix", "--requests", "5")
    words += ("--rate", "4", "--rate", "prefix=3", "--disk-speed", "20MB")
    words += ("--warm-requests", "1", "--memory-requests", "0", "--latency-rounds", "0", *SMALL)
    done = command(*words, "--output", tmp_path, "--quiet", timeout_s=600)
    assert "fewer than 100 requests are a first look" in done.stderr
    found = json.loads((tmp_path / "serve.json").read_text())["throughput"]
    phases = {phase["system"]: phase for phase in found["phases"]}
    assert {name: (one["answered"], one["failed"]) for name, one in phases.items()} == {
        "default": (5, 0),
        "prefix": (5, 0),
    }
    assert found["prompt_tokens"]["default"] == found["prompt_tokens"]["prefix"] > 80
    assert (
        found["stored_share"]["default"] > found["stored_share"]["prefix"]
    )  # reused anywhere, not only at the front
    assert {name: one["rate"] for name, one in phases.items()} == {"default": 4.0, "prefix": 3.0}
    assert all(one["ttft"]["p50"] > 0 and one["peak_bytes"] > 10**8 for one in phases.values())
    assert all(0 < one["gap"]["p50"] <= one["gap"]["longest"] for one in phases.values())
    log = (tmp_path / "phases.jsonl").read_text()
    command(*words, "--output", tmp_path, "--quiet", timeout_s=600)
    assert (tmp_path / "phases.jsonl").read_text() == log  # nothing was measured again, and no server started


def test_first_tokens_come_through_http_and_in_process(tmp_path):
    traffic = ServedTraffic(documents=4, per_request=2, document_tokens=40, new_tokens=3)
    common = SystemSettings(model=None, gguf=None, context_tokens=90, new_tokens=3)
    found = bench_first_token(common, traffic, 2, tmp_path)
    assert found.prompt_tokens > 80
    assert min(found.http_s.low, found.in_process_s.low) > 0


def test_a_short_soak_loses_nothing(tmp_path):
    settings = SoakSettings(
        seconds=4, warm_up_s=4, users=4, kills=1, load_s=1.5, document_tokens=40, new_tokens=4, seed=3
    )
    done = bench_soak(settings, tmp_path)
    assert done.problems == []
    assert done.healthy
    assert sum(counts.get("answered", 0) for counts in done.outcomes.values()) > 10
    assert done.restarts[0].damage.checked > 0


def test_a_server_that_does_not_start_is_named_with_what_it_said(tmp_path):
    with pytest.raises(ServerFailed, match=r"broken ended before it was ready; it wrote: .*no-such-flag"):
        kvweave_server("broken", tmp_path, model=None, flags=["--no-such-flag"]).start()


def test_an_attacker_s_own_texts_are_told_by_their_time_and_another_tenant_s_are_not(
    script, tmp_path, monkeypatch
):
    """Long texts, so that a cached one is several times as fast: few probes then tell what leaks from what does not."""
    timing = script("tenant_timing")
    monkeypatch.setattr(timing, "WARM_UPS", 1)
    args = argparse.Namespace(
        model=None,
        tokens=400,
        probes=8,
        way=["documents"],
        idle_s=0.0,
        seed=0,
        server_flag=["--no-idle-work"],
    )
    rows = {row["before"]: row for row in timing.run(args, tmp_path)["rows"]}
    assert {name: row["probes"] for name, row in rows.items()} == {"attacker": [8, 8], "other": [8, 8]}
    assert all(0 <= row["interval"][0] <= row["auc"] <= row["interval"][1] <= 1 for row in rows.values())
    assert rows["attacker"]["auc"] > 0.9  # the positive control
    assert rows["other"]["auc"] < 0.95  # above, by chance once in 1,800 runs where nothing leaks
    assert {path.name for path in (tmp_path / "tenants-home" / "tenants").iterdir()} == {"attacker", "other"}
