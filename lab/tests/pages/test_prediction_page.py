"""The part of the lab's pages about predicted questions: what it says follows from the figures."""

import copy
import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results" / "prediction.json"


@pytest.fixture
def result():
    """The result in lab/results, to be changed."""
    return copy.deepcopy(json.loads(RESULTS.read_text("utf-8")))


def changed(result, system, **values):
    (row,) = (each for each in result["figures"]["systems"] if each["system"] == system)
    row.update(values)


def test_what_is_served_and_how_fast_is_told_against_the_aims(result, script):
    predicted_questions = script("prediction_page").predicted_questions
    changed(result, "kvweave", served=0.0, mean_s=2.1)
    changed(result, "RAGCache + MeanCache", mean_s=2.0)
    text = predicted_questions(result)
    assert "answers 0.0% of the set's questions" in text
    assert "the aim of 15% is not reached" in text
    assert "is 5.0% higher than that of RAGCache + MeanCache" in text
    assert "the aim of 30% is not reached" in text
    assert "Predictions have no part in it" in text
    changed(result, "kvweave", served=0.2, mean_s=1.0)
    text = predicted_questions(result)
    assert "the aim of 15% is reached" in text
    assert "is 50.0% lower than that of RAGCache + MeanCache" in text
    assert "the aim of 30% is reached" in text
    assert "no part" not in text


def test_that_nothing_near_was_predicted_is_said_only_if_so(result, script):
    predicted_questions = script("prediction_page").predicted_questions
    changed(result, "PerCache as published", served=0.0)
    assert "no matcher had anything to refuse" in predicted_questions(result)
    changed(result, "PerCache as published", served=0.1)
    assert "no matcher had anything to refuse" not in predicted_questions(result)
