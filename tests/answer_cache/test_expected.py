"""Questions that nobody has asked yet, in the bank."""

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerSettings, Provenance
from kvweave.database import Database

HOW = AnswerSettings("reuse", None, None, 5, None, False, None, None)
OTHERWISE = AnswerSettings("full", None, None, 5, None, False, None, None)
EAST, NORTH = np.eye(2, dtype=np.float32)
RESTS_ON = Provenance(frozenset({"v"}), ("v:0",), 0)


@pytest.fixture
def bank(tmp_path):
    """An empty bank."""
    database = Database(tmp_path / "catalog.sqlite")
    yield AnswerCache(database, 10**6)
    database.close()


def whys(bank):
    return {one.question: one.why for one in bank.waiting()}


def test_an_expected_question_waits_and_is_answered_like_any_other(bank):
    bank.expect("Who leads it?", EAST, HOW)
    assert whys(bank) == {"Who leads it?": "predicted"}
    assert bank.find("Who leads it?", lambda: EAST, HOW, 0.85) is None
    bank.put("Who leads it?", EAST, HOW, "Anna", [], RESTS_ON)
    assert whys(bank) == {}
    assert bank.find("Who leads it?", lambda: EAST, HOW, 0.85).text == "Anna"


def test_expecting_what_the_bank_has_changes_nothing(bank):
    bank.put("Who leads it?", EAST, HOW, "Anna", [], RESTS_ON)
    bank.expect("Who leads it?", EAST, HOW)
    bank.prefilled("Who leads it?", HOW)
    assert bank.find("Who leads it?", lambda: EAST, HOW, 0.85).text == "Anna"
    assert whys(bank) == {}
    bank.documents_changed(["v"])
    bank.expect("Who leads it?", EAST, HOW)
    bank.prefilled("Who leads it?", HOW)
    assert whys(bank) == {"Who leads it?": "changed"}


def test_waiting_for_decoding_alone_is_told_apart(bank):
    bank.expect("Who leads it?", EAST, HOW)
    bank.expect("Who leads it?", EAST, OTHERWISE)
    bank.prefilled("Who leads it?", HOW)
    assert [one.circumstances for one in bank.waiting(whys=["prefilled"])] == [HOW]
    assert [one.circumstances for one in bank.waiting(whys=["predicted", "matched"])] == [OTHERWISE]
    assert len(bank.waiting(most=1)) == 1


def test_forgotten_questions_are_gone_under_all_circumstances(bank):
    bank.put("Who leads it?", EAST, HOW, "Anna", [], RESTS_ON)
    bank.expect("Who leads it?", EAST, OTHERWISE)
    bank.expect("Where is it?", NORTH, HOW)
    bank.forget(["Who leads it?"])
    assert bank.totals().questions == 1
    assert bank.find("Who leads it?", lambda: EAST, HOW, 0.85) is None


def test_near_ones_are_found_answered_or_not_under_the_same_circumstances(bank):
    between = (EAST + NORTH) / np.sqrt(2, dtype=np.float32)
    bank.put("Who leads it?", EAST, HOW, "Anna", [], RESTS_ON)
    bank.expect("Where is it?", between, HOW)
    bank.expect("When is it?", NORTH, HOW)
    bank.expect("Why is it?", EAST, OTHERWISE)
    found = dict(bank.near(EAST, HOW, 0.5))
    assert found == {"Who leads it?": 1.0, "Where is it?": pytest.approx(0.7071, abs=1e-3)}


def test_the_most_used_answers_come_first(bank):
    for question in ("Who leads it?", "Where is it?"):
        bank.put(question, EAST, HOW, "Anna", [], RESTS_ON)
    bank.expect("When is it?", NORTH, HOW)
    often = bank.find("Who leads it?", lambda: EAST, HOW, 0.85)
    bank.given(often, "Who leads it?", lambda: EAST)
    assert [question for question, _ in bank.most_used()] == ["Who leads it?", "Where is it?"]


def test_only_who_asks_a_question_uses_it(bank):
    for question in ("Who leads it?", "Where is it?"):
        bank.expect(question, EAST, HOW)
        bank.put(question, EAST, HOW, "Anna", [], RESTS_ON, asked=question.startswith("Where"))
    assert [question for question, _ in bank.most_used()] == ["Where is it?", "Who leads it?"]


def test_a_question_is_forgotten_under_one_way_of_asking_alone(bank):
    for how in (HOW, OTHERWISE):
        bank.put("Who leads it?", EAST, how, "Anna", [], RESTS_ON)
    bank.forget(["Who leads it?"], OTHERWISE)
    assert bank.find("Who leads it?", lambda: EAST, OTHERWISE, 0.85) is None
    assert bank.find("Who leads it?", lambda: EAST, HOW, 0.85).text == "Anna"


def test_a_bank_that_is_off_expects_nothing(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    bank = AnswerCache(database, 0)
    bank.expect("Who leads it?", EAST, HOW)
    assert bank.totals().questions == 0
    database.close()


def test_predictions_push_out_each_other_and_nothing_that_was_asked(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    bank = AnswerCache(database, 4000)
    asked = ["Who leads it?", "Where is it?"]
    for question in asked:
        bank.put(question, EAST, HOW, "Anna", [], RESTS_ON)
    for number in range(20):
        bank.expect(f"Who leads number {number}?", EAST, HOW)
        bank.put(f"Who leads number {number}?", EAST, HOW, "Anna", [], RESTS_ON, asked=False)
    assert bank.totals().bytes <= 4000
    assert bank.totals().questions > len(asked)
    for question in asked:
        assert bank.find(question, lambda: EAST, HOW, 0.85) is not None
    database.close()


def test_the_cap_holds_for_expected_questions_too(tmp_path):
    database = Database(tmp_path / "other.sqlite")
    bank = AnswerCache(database, 2000)
    for number in range(10):
        bank.expect(f"Who leads number {number}?", EAST, HOW)
    assert bank.totals().bytes <= 2000
    assert 0 < bank.totals().questions < 10
    database.close()
