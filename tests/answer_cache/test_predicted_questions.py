"""Predicted questions in the answer cache."""

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.database import Database
from kvweave.options import AskOptions

SETTINGS = AskOptions("reuse", 5)
OTHER_SETTINGS = AskOptions("full", 5)
EAST, NORTH = np.eye(2, dtype=np.float32)
PROVENANCE = AnswerProvenance(frozenset({"v"}), ("v:0",), 0)


@pytest.fixture
def cache(tmp_path):
    """An empty cache."""
    database = Database(tmp_path / "catalog.sqlite")
    yield AnswerCache(database, 10**6)
    database.close()


def reasons(cache):
    return {one.question: one.reason for one in cache.pending()}


def test_a_predicted_question_is_pending_and_is_answered_like_any_other(cache):
    cache.add_predicted("Who leads it?", EAST, SETTINGS)
    assert reasons(cache) == {"Who leads it?": "predicted"}
    assert cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85) is None
    cache.put("Who leads it?", EAST, SETTINGS, "Anna", [], PROVENANCE)
    assert reasons(cache) == {}
    assert cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85).text == "Anna"


def test_predicting_a_question_in_the_cache_changes_nothing(cache):
    cache.put("Who leads it?", EAST, SETTINGS, "Anna", [], PROVENANCE)
    cache.add_predicted("Who leads it?", EAST, SETTINGS)
    cache.mark_prefilled("Who leads it?", SETTINGS)
    assert cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85).text == "Anna"
    assert reasons(cache) == {}
    cache.documents_changed(["v"])
    cache.add_predicted("Who leads it?", EAST, SETTINGS)
    cache.mark_prefilled("Who leads it?", SETTINGS)
    assert reasons(cache) == {"Who leads it?": "changed"}


def test_prefilled_questions_are_listed_apart(cache):
    cache.add_predicted("Who leads it?", EAST, SETTINGS)
    cache.add_predicted("Who leads it?", EAST, OTHER_SETTINGS)
    cache.mark_prefilled("Who leads it?", SETTINGS)
    assert [one.options for one in cache.pending(reasons=["prefilled"])] == [SETTINGS]
    assert [one.options for one in cache.pending(reasons=["predicted", "matched"])] == [OTHER_SETTINGS]
    assert len(cache.pending(most=1)) == 1


def test_a_question_is_deleted_under_all_settings(cache):
    cache.put("Who leads it?", EAST, SETTINGS, "Anna", [], PROVENANCE)
    cache.add_predicted("Who leads it?", EAST, OTHER_SETTINGS)
    cache.add_predicted("Where is it?", NORTH, SETTINGS)
    cache.delete(["Who leads it?"])
    assert cache.totals().questions == 1
    assert cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85) is None


def test_similar_questions_are_found_answered_or_not_under_the_same_settings(cache):
    between = (EAST + NORTH) / np.sqrt(2, dtype=np.float32)
    cache.put("Who leads it?", EAST, SETTINGS, "Anna", [], PROVENANCE)
    cache.add_predicted("Where is it?", between, SETTINGS)
    cache.add_predicted("When is it?", NORTH, SETTINGS)
    cache.add_predicted("Why is it?", EAST, OTHER_SETTINGS)
    found = dict(cache.similar(EAST, SETTINGS, 0.5))
    assert found == {"Who leads it?": 1.0, "Where is it?": pytest.approx(0.7071, abs=1e-3)}


def test_the_most_used_answers_come_first(cache):
    for question in ("Who leads it?", "Where is it?"):
        cache.put(question, EAST, SETTINGS, "Anna", [], PROVENANCE)
    cache.add_predicted("When is it?", NORTH, SETTINGS)
    often = cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85)
    cache.record_hit(often, "Who leads it?", lambda: EAST)
    assert [question for question, _ in cache.most_used()] == ["Who leads it?", "Where is it?"]


def test_only_asking_a_question_counts_as_a_use(cache):
    for question in ("Who leads it?", "Where is it?"):
        cache.add_predicted(question, EAST, SETTINGS)
        cache.put(question, EAST, SETTINGS, "Anna", [], PROVENANCE, asked=question.startswith("Where"))
    assert [question for question, _ in cache.most_used()] == ["Where is it?", "Who leads it?"]


def test_a_question_is_deleted_under_one_of_its_settings(cache):
    for settings in (SETTINGS, OTHER_SETTINGS):
        cache.put("Who leads it?", EAST, settings, "Anna", [], PROVENANCE)
    cache.delete(["Who leads it?"], OTHER_SETTINGS)
    assert cache.find("Who leads it?", lambda: EAST, OTHER_SETTINGS, 0.85) is None
    assert cache.find("Who leads it?", lambda: EAST, SETTINGS, 0.85).text == "Anna"


def test_a_cache_that_is_off_stores_no_predictions(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    cache = AnswerCache(database, 0)
    cache.add_predicted("Who leads it?", EAST, SETTINGS)
    assert cache.totals().questions == 0
    database.close()


def test_predictions_evict_each_other_and_nothing_that_was_asked(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    cache = AnswerCache(database, 4000)
    asked = ["Who leads it?", "Where is it?"]
    for question in asked:
        cache.put(question, EAST, SETTINGS, "Anna", [], PROVENANCE)
    for number in range(20):
        cache.add_predicted(f"Who leads number {number}?", EAST, SETTINGS)
        cache.put(f"Who leads number {number}?", EAST, SETTINGS, "Anna", [], PROVENANCE, asked=False)
    assert cache.totals().bytes <= 4000
    assert cache.totals().questions > len(asked)
    for question in asked:
        assert cache.find(question, lambda: EAST, SETTINGS, 0.85) is not None
    database.close()


def test_the_cap_holds_for_predicted_questions_too(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    cache = AnswerCache(database, 2000)
    for number in range(10):
        cache.add_predicted(f"Who leads number {number}?", EAST, SETTINGS)
    assert cache.totals().bytes <= 2000
    assert 0 < cache.totals().questions < 10
    database.close()
