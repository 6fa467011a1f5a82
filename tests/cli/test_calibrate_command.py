"""Calibration through the real command."""

import json

import pytest

from kvweave.background import budget_trials, calibration

GLORRIC = "What is the password of Glorric?"
QUESTIONS = (GLORRIC, "What is the password of Sendbel?", "What did Bertnis order?")


@pytest.fixture
def three(monkeypatch, tmp_path):
    """Three questions are enough, and one budget is tried; returns their file."""
    made = budget_trials.candidates
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: made(*given)[1:2])
    monkeypatch.setattr(calibration, "MIN_QUESTIONS", 3)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"question": each}) for each in QUESTIONS))
    return file


def test_a_verdict_is_made_shown_and_used(command, documents, three):
    command("add", documents, "--quiet", "--recipe", "reuse")
    assert "auto is weave, since it was not calibrated" in command("calibrate", "--show").stdout
    few = command("calibrate", code=1).stderr
    assert "0 questions are known, and a verdict needs 3" in " ".join(few.split())
    wanted = ("--first-tokens", "0", "--answers", "0")
    told = command("calibrate", "--questions", three, *wanted).stdout
    assert "auto is reuse, since 2" in told
    assert "3 questions: 0 asked, 0 predicted, 3 given; reference" in " ".join(told.split())
    shown = command.json("calibrate", "--show", *wanted)
    assert shown["told"] in told
    assert shown["verdict"]["recipe"] == "reuse"
    assert [trial["questions"] for trial in shown["verdict"]["trials"]] == [3]
    environment = {"KVWEAVE_CALIBRATE_FIRST_TOKENS": "0", "KVWEAVE_CALIBRATE_ANSWERS": "0"}
    explained = command("ask", GLORRIC, "--explain", **environment).stdout
    assert "recipe reuse, ratio 0" in explained
    assert shown["told"] in explained


def test_fewer_bits_are_tried_shown_and_told(command, documents, three, monkeypatch):
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: ())
    command("add", documents, "--quiet", "--recipe", "prefix", "--device", "cpu")
    assert "weights" not in command("calibrate", "--questions", three).stdout
    assert "weights" not in {finding["name"] for finding in command.json("doctor")}
    both = ("--try-weights", "int8", "--try-weights", "int4")
    told = command("calibrate", "--questions", three, *both).stdout
    rows = {words[0]: words for line in told.splitlines() if (words := line.split())}
    assert rows["full,"][:4] == ["full,", "as", "it", "is"]
    assert rows["int8"][3:] == ["3", "3", "(44%", "to", "100%)", "3", "(44%", "to", "100%)", "keeps"]
    sentence = told.splitlines()[-1]
    assert sentence.startswith("int")
    assert (
        "prefix is the cheapest recipe that keeps enough with them; `kvweave add PATHS --weights int"
        in sentence
    )
    assert (
        "this one keeps its full weights, since its stored KV, answers and conversations are of them"
        in sentence
    )
    shown = command("calibrate", "--show").stdout
    assert sentence in shown
    found = command.json("calibrate", "--show")
    assert found["weights_told"] == sentence
    weights = found["verdict"]["weights"]
    assert weights["own"] == "full"
    assert [trial["bits"] for trial in weights["trials"]] == ["int8", "int4"]
    assert weights["own_bytes"] > weights["trials"][0]["bytes"] > weights["trials"][1]["bytes"]
    (finding,) = (each for each in command.json("doctor") if each["name"] == "weights")
    assert finding["detail"] == found["weights_told"]


def test_weights_that_cannot_be_tried_are_refused(command, documents, three):
    command("add", documents, "--quiet", "--recipe", "prefix")
    given = ("calibrate", "--questions", three, "--try-weights")
    assert "weights 'int3' cannot be tried; try int8 or int4" in command(*given, "int3", code=1).stderr
    shown = command("calibrate", "--show", "--try-weights", "int8", code=1).stderr
    assert "--show measures nothing" in shown


def test_a_file_that_holds_no_questions_is_refused(command, documents, tmp_path):
    command("add", documents, "--quiet", "--recipe", "prefix")
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "When?"}\n["no"]\n')
    refused = " ".join(command("calibrate", "--questions", file, code=1).stderr.split())
    assert "line 2 of" in refused
    assert "is no JSON object like" in refused
    file.write_bytes(b"\xff\xfe")
    assert "is no text in UTF-8" in " ".join(command("calibrate", "--questions", file, code=1).stderr.split())
