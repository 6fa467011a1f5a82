"""The command `kvweave eval prediction`: what was served, what was wrong, and that it resumes."""

import json
from dataclasses import replace

import pytest
from natural_set import write_set

from kvweave.engine.background.prediction import QuestionPredictor
from kvweave.errors import InvalidRequest
from kvweave_lab.eval.natural import questions
from kvweave_lab.eval.prediction.run import Request, choose, is_same

SERVED = "What does the ticket cost?"


@pytest.fixture
def small_set(tmp_path, monkeypatch):
    """A small set in place of the shipped one; the model predicts one of its questions, and one that nobody asks."""
    content = questions.read_set(*write_set(tmp_path))
    content = questions.QuestionSet(
        content.documents, tuple(replace(each, split="dev") for each in content.questions)
    )
    monkeypatch.setattr(questions, "shipped_set", lambda: content)
    replies = iter([SERVED, "What colour is the ferry?"])
    monkeypatch.setattr(
        QuestionPredictor,
        "reply",
        lambda own, notes, request, draw: (
            " ".join(notes) if "key content" in request.text else next(replies, "")
        ),
    )
    monkeypatch.setattr("kvweave.engine.background.jobs.is_supported", lambda *given: True)
    return content


def test_questions_are_served_from_predictions_and_the_run_resumes(command, small_set, tmp_path):
    words = ["eval", "prediction", "--documents", 2, "--predictions", 1, "--examples", 0, "--recipe", "reuse"]
    words += ["--output", tmp_path / "out"]
    shown = command(*words, "--quiet")
    assert "with predictions" in shown.stdout
    assert "not to be quoted" in shown.stderr
    written = json.loads((tmp_path / "out" / "prediction.json").read_text())
    figures = written["figures"]
    asked = figures["questions"]
    assert asked >= 2
    assert figures["predicted"] == {"knowledge": 2}
    assert figures["served"] == pytest.approx(1 / asked)
    assert figures["served_by_origin"] == {"knowledge": 1}
    assert figures["wrong"] == 0
    assert figures["idle_flops"] > 0
    served = [each for each in written["questions"] if each["origin"]]
    assert [(each["arm"], each["served_by"], each["ready"]) for each in served] == [
        ("predicted", SERVED, True)
    ]
    again = command.json(*words)
    assert again["questions"] == written["questions"]
    refused = command(*words, "--predictions", 2, code=1).stderr
    assert "differ in predictions" in " ".join(refused.split())


def test_documents_that_a_question_links_are_chosen_together(small_set):
    names, asked = choose(small_set, Request(2, 1))
    assert len(names) <= 2
    assert all({one.doc for one in each.evidence} <= set(names) for each in asked)
    with pytest.raises(InvalidRequest, match="name more --documents or another --split"):
        choose(small_set, Request(1, 1, split="test"))


def test_an_answer_is_the_same_in_other_words_only_if_they_overlap():
    assert is_same("The green ferry.", "green ferry")
    assert is_same("four crowns", "it costs four crowns")
    assert not is_same("four crowns", "nine marks")
    assert is_same("", "")
