"""The experiment that replays an evaluation's traces on another model."""

from dataclasses import replace

import pytest

from kvweave.testing import tiny_adapter
from kvweave_lab.eval.outcomes import Trace
from lab_support.evaluations import evaluated, outcomes
from lab_support.outcomes import OUTCOME


@pytest.fixture
def replay(script):
    return script("replay")


def test_traces_are_means_by_length_recipe_and_ratio(replay):
    others = replace(OUTCOME, sample="other", trace=Trace(3, 2, 3, 4, 7)), replace(OUTCOME, recipe="other")
    means = replay.mean_traces([OUTCOME, *others])
    assert list(means) == [(512, ("other", 0.2, None)), (512, ("reuse", 0.2, None))]
    assert means[512, ("reuse", 0.2, None)] == {
        "exact": 2.0,
        "stale": 2.0,
        "recomputed": 3.0,
        "fresh": 4.0,
        "decoded": 6.0,
    }


def test_the_result_has_rows_and_the_environment(replay, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "random_model", lambda shape: tiny_adapter(shape))
    trace = Trace(exact=10, stale=20, recomputed=5, fresh=7, decoded=2)
    folder = evaluated(tmp_path / "here", outcomes(trace=trace))
    made = replay.result([folder], "qwen3", scale=2.0, repeats=2)
    assert [(row["context_tokens"], row["recipe"], row["ratio"]) for row in made["rows"]] == [
        (512, "naive", 0.0),
        (512, "reuse", 0.0),
    ]
    for row in made["rows"]:
        assert row["trace"] == {"exact": 10, "stale": 20, "recomputed": 5, "fresh": 7, "decoded": 2}
        assert min(row["ttft_s"], row["full_ttft_s"], row["decode_s"]) > 0
        low, high = row["ttft_over_full_range"]
        assert low <= row["ttft_over_full"] <= high
    assert made["command"] == "lab/experiments/replay.py here --shape qwen3 --scale 2 --repeats 2"
    assert made["digest"] == "tiny"
    assert made["evaluations"] == ["kvweave eval --split test --output 512"]
    assert (made["dtype"], made["device"], made["scale"]) == ("float32", "cpu", 2.0)
    assert {"date", "commit", "machine", "threads"} <= set(made)


def test_the_computed_rows_are_those_of_the_trace(replay, monkeypatch):
    adapter = tiny_adapter()
    computed = []
    compute = type(adapter).compute
    monkeypatch.setattr(
        type(adapter),
        "compute",
        lambda self, kv_cache, ids, plan: (
            computed.append((len(ids), len(plan.rows))) or compute(self, kv_cache, ids, plan)
        ),
    )
    replay.replay(adapter, {"exact": 10, "stale": 20, "recomputed": 5, "fresh": 7, "decoded": 0}, 2.0)
    assert computed == [(74, 24)]
