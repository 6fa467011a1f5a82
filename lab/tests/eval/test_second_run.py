"""The experiment that compares a second training run with the shipped model."""

import pytest

from kvweave.errors import InvalidRequest
from kvweave.models.loading import load_model
from kvweave_lab.eval.evaluation import Request, run_evaluation
from kvweave_lab.eval.grid import Suite

TASKS = ("multivalue", "vartrack")


@pytest.fixture
def second_run(script):
    return script("second_run")


@pytest.fixture
def quality():
    """Rows of the shipped model, on three prompts of each task."""
    full = [
        {
            "context_tokens": 512,
            "task": task,
            "recipe": "full",
            "samples": 3,
            "score": 0.5,
            "score_interval": [0.4, 0.6],
        }
        for task in TASKS
    ]
    return {"split": "test", "chunk_tokens": 96, "rows": [*full, full[0] | {"recipe": "reuse"}]}


def test_tasks_without_scores_to_compare_with_are_refused(second_run, quality):
    with pytest.raises(InvalidRequest, match=r"quality\.json has no scores of coref; name other tasks"):
        second_run.full_rows(quality, ["multivalue", "coref"])


def test_it_scores_as_the_evaluation_does(second_run, quality, monkeypatch, tmp_path):
    adapter = load_model(dtype="float32")
    suite = Suite(TASKS, (512,), 96, ("full",), (0.0,), (0,), 3)
    rows = run_evaluation(adapter, Request(suite, "test")).rows
    expected = {row.task: row.score for row in rows if row.recipe == "full"}
    found = list(second_run.compare(adapter, quality, second_run.full_rows(quality, TASKS), tmp_path))
    for row in found:
        one = expected[row["task"]]
        assert row["second"] == pytest.approx([one.value, one.low, one.high], abs=1e-6)
        assert row["first"] == [0.5, 0.4, 0.6]
    monkeypatch.setattr(second_run, "plain_answer", None)  # all scores are in the folder
    assert list(second_run.compare(adapter, quality, second_run.full_rows(quality, TASKS), tmp_path)) == found
