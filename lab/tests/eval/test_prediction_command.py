"""The command `kvweave eval prediction`: what was served, what was wrong, and that it resumes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvweave.background.prediction import QuestionPredictor
from kvweave.errors import InvalidRequest
from kvweave.state.background_budget import Spent
from kvweave_lab.eval.natural import questions
from kvweave_lab.eval.prediction.run import Request, choose, run
from kvweave_lab.eval.prediction.systems import Derivation, Prediction, Prefixes, is_same
from lab_support.natural_set import write_set

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
    monkeypatch.setattr("kvweave.background.jobs.is_supported", lambda *given: True)
    return content


def test_questions_are_served_from_predictions_and_the_run_resumes(command, small_set, tmp_path):
    words = ["eval", "prediction", "--documents", 2, "--predictions", 1, "--examples", 0, "--recipe", "reuse"]
    words += ["--output", tmp_path / "out"]
    shown = command(*words, "--quiet")
    assert "RAGCache + MeanCache" in shown.stdout
    assert "not to be quoted" in shown.stderr
    written = json.loads((tmp_path / "out" / "prediction.json").read_text())
    figures = written["figures"]
    asked = figures["questions"]
    assert asked >= 2
    assert figures["predicted"] == {"knowledge": 2}
    assert figures["served_by_origin"] == {"knowledge": 1}
    funnel = figures["funnel"]
    assert (funnel["questions"], funnel["matched"], funnel["held"]) == (asked, 1, 1)
    (sure,) = (each for each in funnel["passages"] if each["sure"])
    assert (sure["matched"], sure["cosine"]) == (SERVED, pytest.approx(1))
    assert funnel["matched_right"] == sure["right"] <= funnel["predicted"]
    served = {row["system"]: row["right"] + row["wrong"] for row in funnel["rows"]}
    assert served["nothing predicted"] == 0
    assert served["kvweave 0.02"] == 1 <= served["PerCache as published"]
    rows = {each["system"]: each for each in figures["systems"]}
    ready = {name: row["ready_tokens"] for name, row in rows.items()}
    assert ready["RAGCache"] < ready["PerCache as published"] < ready["kvweave"] == 1, (
        "what was predicted left KV"
    )
    assert rows["kvweave"]["served"] == pytest.approx(1 / asked)
    assert rows["kvweave"]["wrong"] == 0
    assert rows["kvweave"]["idle_flops"] > 0
    assert rows["kvweave without predictions"]["served"] == rows["RAGCache + MeanCache"]["served"] == 0
    assert rows["PerCache as published"]["served"] >= 1 / asked
    assert rows["RAGCache"]["idle_s"] == 0 < rows["RAGCache"]["mean_s"]
    assert {each["dropped"] for each in written["predicted questions"]} == {None}
    served = [each for each in written["questions"] if each["origin"]]
    assert [(each["arm"], each["served_by"], each["ready"]) for each in served] == [
        ("predicted", SERVED, True)
    ]
    again = command.json(*words)
    assert again["questions"] == written["questions"]
    refused = command(*words, "--predictions", 2, code=1).stderr
    assert "differ in predictions" in " ".join(refused.split())


def test_a_run_that_is_out_of_time_tells_what_is_done_and_goes_on(small_set, tmp_path):
    request = Request(2, 1, examples=0, settings={"recipe": "reuse"}, minutes=0)
    figures, outcomes, _, predictions = run(small_set, request, tmp_path / "out")
    assert (figures.questions, figures.systems, outcomes, predictions) == (0, (), [], [])
    assert (figures.funnel.predicted, figures.funnel.matched, figures.funnel.auc) == (0, 0, None)
    figures, _, _, predictions = run(small_set, replace(request, minutes=60), tmp_path / "out")
    assert figures.questions == figures.funnel.questions > 1
    assert {each.question for each in predictions} == {SERVED, "What colour is the ferry?"}


def test_idle_work_resumes_in_the_middle(small_set, tmp_path, monkeypatch):
    say, finished = QuestionPredictor.reply, []

    def stopped(own, notes, request, draw):
        if draw == 6 and not finished.count("stopped"):
            finished.append("stopped")
            raise KeyboardInterrupt
        if "key content" not in request.text:
            finished.append((tuple(notes), draw))
        return say(own, notes, request, draw)

    monkeypatch.setattr(QuestionPredictor, "reply", stopped)
    request = Request(2, 3, examples=0, settings={"recipe": "reuse"})
    with pytest.raises(KeyboardInterrupt):
        run(small_set, request, tmp_path / "out")
    before = finished.index("stopped")
    assert before > 5
    figures, _, _, predictions = run(small_set, request, tmp_path / "out")
    again = set(finished[:before]) & set(finished[before + 1 :])
    assert {draw for _, draw in again} <= {5}  # the round that was stopped
    assert {each.question for each in predictions if each.answer} == {SERVED, "What colour is the ferry?"}
    assert figures.served_by_origin == {"knowledge": 1}


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


def test_kv_is_found_after_exactly_the_same_chunks():
    left = Prefixes([[("a", 3), ("b", 5)]])
    assert left.found([("a", 3), ("c", 1)]) == 0.75
    assert left.found([("b", 5), ("a", 3)]) == 0
    left.add([("a", 3), ("c", 1), ("d", 1)])
    assert left.found([("a", 3), ("c", 1)]) == 1
    assert left.found([]) == 0


class Outcome:
    """What an arm computed."""

    def __init__(self, text):
        self.text, self.origin, self.ready, self.exact, self.seconds = text, None, False, 0.5, 10.0


def test_other_systems_give_the_answer_with_the_nearest_vector_be_it_screened_or_not():
    vectors = {
        "a?": (1, 0),
        "as a?": (0.9, 0.43589),
        "b?": (0, 1),
        "as b?": (0.43589, 0.9),
        "c?": (-1, 0),
        "own?": (-1, 0),
    }
    asked = [
        questions.Question(each, each, ("four crowns",), "within", (), "dev")
        for each in ("as a?", "a?", "as b?", "c?")
    ]
    predictions = [
        Prediction("b?", "knowledge", "unclear", None),
        Prediction("own?", "paraphrase", None, "another"),
    ]
    computed = {"as a?": "four crowns", "a?": "four crowns", "as b?": "four crowns", "c?": "four"}
    derived = Derivation(
        asked,
        {id_: Outcome(text) for id_, text in computed.items()},
        computed,
        predictions,
        lambda texts: np.array([vectors[each] for each in texts], dtype=np.float32),
        0.85,
        lambda question: {"b?": "nine marks"}[question],
        lambda question: [(question[-2:], 3), ("c?", 1)],
    )
    rows, served = derived.systems({"population": Spent(1, 2.0, 3.0), "paraphrase": Spent(1, 9.0, 9.0)})
    given = {(each.system, each.question, each.served_by, each.source, each.wrong) for each in served}
    assert given == {
        ("RAGCache + MeanCache", "a?", "as a?", "asked", False),
        ("RAGCache + Sleep-time", "as b?", "b?", "predicted", True),
        ("PerCache as published", "a?", "as a?", "asked", False),
        ("PerCache as published", "as b?", "b?", "predicted", True),
    }
    row = {each.system: each for each in rows}["PerCache as published"]
    assert (row.served, row.served_asked, row.wrong, row.worse, row.ready) == (0.25, 0.25, 0.25, 0.25, 0.5)
    assert (row.contains, row.idle_s, row.ready_tokens) == (0.5, 2.0, 0.5)
    assert 5.0 <= row.mean_s < 5.1
