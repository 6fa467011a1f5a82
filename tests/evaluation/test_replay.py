"""The benchmark that replays an evaluation's traces reads what the journal writes."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from test_journal import OUTCOME, SUBJECT

from kvweave.evaluation.journal import Journal
from kvweave.evaluation.results import Trace


@pytest.fixture
def replay(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("replay")


def test_traces_are_means_by_length_recipe_and_ratio_of_whole_outcomes(replay, tmp_path):
    """An answer may hold what Python takes for the end of a line, and a crash may tear the last outcome."""
    with Journal(tmp_path, SUBJECT) as journal:
        journal.add(replace(OUTCOME, answer="one\u2028two\x85three\x1cfour"))
        journal.add(replace(OUTCOME, sample="other", trace=Trace(3, 2, 3, 4, 7)))
        journal.add(replace(OUTCOME, recipe="torn"))
    file = tmp_path / "outcomes.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert replay.mean_traces(tmp_path) == {
        (512, "reuse", 0.2): {"exact": 2.0, "stale": 2.0, "recomputed": 3.0, "fresh": 4.0, "decoded": 6.0}
    }
