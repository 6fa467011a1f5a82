"""Stored answers that contradict each other are put to the model again at idle time, and one stays."""

from types import SimpleNamespace

import pytest

from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answering.agreement import contradict, support
from kvweave.background.precompute import Precomputer
from kvweave.background.prediction import QuestionPredictor
from kvweave.index.documents import version_of

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")

GLORRIC = "What is the password of Glorric?"
AGAIN = "Please tell me the password of Glorric."
MISTYPED = "What is the pasword of Glorric?"
"""The same question under another key."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("walnut", "maple"),
        ("The password is walnut.", "maple"),
        ("Yes.", "No."),
        ("It is allowed.", "It is not allowed."),
        ("It isn't open.", "It is open."),
        ("Within 30 days.", "Within 14 days."),
        ("In the year 1902 at Leeds.", "In the year 1920 at Leeds."),
        ("The boat belongs to Anna Brown.", "The boat belongs to Carl Brown."),
    ],
)
def test_answers_that_differ_in_substance_contradict_each_other(one, other):
    assert contradict(one, other)
    assert contradict(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("walnut", "Walnut."),
        ("walnut", "The password is walnut."),
        ("30 days", "within 30 days of the invoice"),
        ("Anna", "It belongs to Anna."),
        ("", ""),
        (
            "The committee met on Monday and decided to renovate the old harbour.",
            "On Monday the committee decided that the old harbour will be renovated.",
        ),
    ],
)
def test_answers_that_say_the_same_do_not(one, other):
    assert not contradict(one, other)
    assert not contradict(other, one)


def test_support_is_the_share_of_words_that_the_documents_contain():
    texts = ["The password of Glorric is walnut."]
    assert support("walnut", texts) == 1
    assert support("walnut maple", texts) == 0.5
    assert support("maple", texts) == 0
    assert support("The documents do not say.", texts) == -1


@pytest.fixture
def again():
    return AGAIN


@pytest.fixture
def base(open_kb, documents, monkeypatch, again):
    """A knowledge base in which two questions that are the same have contradictory answers."""
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any")
    kb.add(documents)
    monkeypatch.setattr(QuestionPredictor, "next_job", lambda predictor: None)
    right = kb.ask(GLORRIC)
    ((_, settings),) = kb.answers.most_used()
    vector = kb.encoder.encode([again])[0]
    (row,) = [kb.answers.find(GLORRIC, lambda: vector, settings, 0.85)]
    versions = frozenset(name.rpartition(":")[0] for name in row.chunks)
    origin = AnswerProvenance(versions, row.chunks, row.epoch)
    kb.answers.put(again, vector, settings, "maple", right.sources, origin)
    return kb


def texts(base, again=AGAIN):
    return {question: base.ask(question).text for question in (GLORRIC, again)}


def test_both_are_put_to_the_model_again(base):
    assert texts(base) == {GLORRIC: "walnut", AGAIN: "maple"}
    report = base.idle()
    assert report.jobs["contradiction"] == 1
    assert texts(base) == {GLORRIC: "walnut", AGAIN: base.ask(AGAIN, cache="off").text}
    assert "contradiction" not in base.idle().jobs


@pytest.mark.parametrize("again", [AGAIN, MISTYPED])
def test_one_stays_if_the_model_still_contradicts_itself(base, again, monkeypatch):
    assert texts(base, again) == {GLORRIC: "walnut", again: "maple"}
    asked = []
    monkeypatch.setattr(Precomputer, "answer", lambda own, question, settings: asked.append(question))
    base.idle()
    assert sorted(asked) == sorted([GLORRIC, again])
    assert texts(base, again) == {GLORRIC: "walnut", again: "walnut"}, "the documents contain it"
    assert "contradiction" not in base.idle().jobs


def test_many_wordings_are_settled_once_and_stay(base, monkeypatch):
    """The model gives each wording an answer of its own, whenever it is asked: pair by pair, one would undo another."""
    others = {
        AGAIN: "maple",
        "Could you tell me what the password of Glorric is?": "oak",
        "Which is the password of Glorric?": "ash",
    }
    ((_, settings),) = [each for each in base.answers.most_used() if each[0] == GLORRIC]
    vector = dict(zip(others, base.encoder.encode(list(others)), strict=True))
    row = base.answers.find(GLORRIC, lambda: vector[AGAIN], settings, 0.85)
    origin = AnswerProvenance(frozenset(map(version_of, row.chunks)), row.chunks, row.epoch)
    own = {GLORRIC: ("walnut", row.vector), **{each: (others[each], vector[each]) for each in others}}
    asked = []

    def answer(precomputer, question, settings):
        asked.append(question)
        text, vector = own[question]
        precomputer.cached.answers.put(question, vector, settings, text, row.sources, origin)

    for question in others:
        answer(SimpleNamespace(cached=base), question, settings)
    asked.clear()
    monkeypatch.setattr(Precomputer, "answer", answer)
    report = base.idle()
    assert report.jobs["contradiction"] == 1
    assert sorted(asked) == sorted(own), "each is asked once"
    assert {base.ask(each).text for each in own} == {"walnut"}, "the documents contain it"
    assert "contradiction" not in base.idle().jobs
