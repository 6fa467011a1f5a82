"""Calibration through the real command."""

import json

import pytest

from kvweave.background import budget_trials, calibration

pytestmark = pytest.mark.usefixtures("few_labelled_pairs")

GLORRIC = "What is the password of Glorric?"
QUESTIONS = (GLORRIC, "What is the password of Sendbel?", "What did Bertnis order?")


@pytest.fixture
def three(monkeypatch, tmp_path):
    """Three questions are enough, and one budget is tried; returns their file."""
    made = budget_trials.candidates
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: made(*given)[:1])
    monkeypatch.setattr(calibration, "MIN_QUESTIONS", 3)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"question": each}) for each in QUESTIONS))
    return file


def test_a_verdict_is_made_shown_and_used(command, documents, three):
    command("add", documents, "--quiet", "--recipe", "reuse")
    assert "auto is weave-shifted, since it was not calibrated" in command("calibrate", "--show").stdout
    few = command("calibrate", code=1).stderr
    assert "0 questions are known, and a calibration needs 3" in " ".join(few.split())
    wanted = ("--tokens", "0")
    told = command("calibrate", "--questions", three, *wanted).stdout
    assert "auto is reuse, since 2" in told
    assert "questions in other words: none: reference does not judge well enough: AUC" in " ".join(
        told.split()
    )
    assert "3 questions: 0 asked, 0 predicted, 3 given; reference" in " ".join(told.split())
    shown = command.json("calibrate", "--show", *wanted)
    assert shown["told"] in told
    assert shown["verdict"]["recipe"] == "reuse"
    assert "does not judge well enough" in shown["judging"]
    assert [trial["questions"] for trial in shown["verdict"]["trials"]] == [3]
    environment = {"KVWEAVE_CALIBRATE_TOKENS": "0"}
    explained = command("ask", GLORRIC, "--explain", **environment).stdout
    assert "recipe reuse, ratio 0" in explained
    assert shown["told"] in explained


def test_a_file_that_holds_no_questions_is_refused(command, documents, tmp_path):
    command("add", documents, "--quiet", "--recipe", "prefix")
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "When?"}\n["no"]\n')
    refused = " ".join(command("calibrate", "--questions", file, code=1).stderr.split())
    assert "line 2 of" in refused
    assert "is no JSON object like" in refused
    file.write_bytes(b"\xff\xfe")
    assert "is no text in UTF-8" in " ".join(command("calibrate", "--questions", file, code=1).stderr.split())
