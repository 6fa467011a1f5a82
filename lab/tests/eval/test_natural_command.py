"""The command `kvweave eval natural`: its tables, its JSON, and what it refuses before a model is loaded."""

import json

import pytest

from kvweave_lab.eval.natural import library, run
from lab_support.natural_set import QUESTIONS, WordEncoder, write_set


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The command with a small set and its own index."""
    monkeypatch.setattr("kvweave.embedding.TextEncoder", lambda model=None: WordEncoder())
    monkeypatch.setattr(run, "CHUNKS", 3)  # offline costs need not be exact here
    for module in (library, run):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    documents, questions = write_set(tmp_path, [each | {"split": "test"} for each in QUESTIONS])
    words = ["eval", "natural", "--documents", documents, "--questions", questions, "--distractors", "2"]
    return [*words, "--split", "test", "--context-tokens", "96", "--chunk-tokens", "32"]


def test_recipes_run_on_a_set_of_ones_own_and_resume(command, asked, tmp_path):
    words = [
        *asked,
        "--recipe",
        "prophetkv",
        "--against",
        "prophetkv",
        "--recipe",
        "epic",
        "--ratio",
        "0.2",
        "--examples",
        "1",
        "--limit",
        "2",
    ]
    words += ["--answers", "8", "--output", tmp_path / "out"]
    shown = command(*words, "--quiet")
    for text in (
        "Evidence found",
        "Neighbours retrieved together",
        "The gap between",
        "2 prompts",
        "Compared prompt",
    ):
        assert text in shown.stdout
    assert "not to be quoted" in shown.stderr
    written = json.loads((tmp_path / "out" / "natural.json").read_text())
    assert written["about"]["command"].startswith("kvweave eval natural")
    assert written["about"]["split"] == "test"
    assert written["about"]["critical_layers"]  # with which qcfuse scores
    assert {row["recipe"] for row in written["rows"]} == {"full", "no context", "reuse", "prophetkv", "epic"}
    assert all(row["f1"] is not None for row in written["rows"])
    assert len((tmp_path / "out" / "natural.jsonl").read_text().splitlines()) == 1 + 2 * 5
    assert command.json(*words)["rows"] == written["rows"]


def test_retrieval_alone_runs_no_language_model(command, asked, monkeypatch):
    monkeypatch.setattr("kvweave.models.adapter.Adapter.compute", None)
    found = command.json(*asked, "--retrieval")
    assert found["rows"] == []
    assert found["retrieval"]["neighbours"] == [1, 3, 5, 10]
    assert found["retrieval"]["questions"] == 5
    assert [ranking["name"] for ranking in found["retrieval"]["rankings"]] == ["hybrid", "words", "vectors"]


def test_a_fault_in_the_set_is_named_before_a_model_is_loaded(command, asked, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"id": "a"}\n')
    refused = command(*asked, "--model", "/gone", code=1)
    assert "line 1 (a): has no answers, evidence, kind, question" in refused.stderr.replace("\n", "")
