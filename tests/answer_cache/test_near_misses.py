"""Near misses: what is remembered, what is learned from verdicts, and when an answer may be given."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.near_misses import NearMiss, Verdict, least_score
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.database import Database
from kvweave.options import AskOptions

SETTINGS = AskOptions("reuse", 4)
STORED, ASKED = "Who lends the amplifier to the band?", "Who is giving the musicians a loan of the amp?"
NUMBERS = count()
EAST = np.array([1.0, 0.0, 0.0], dtype=np.float32)
NEAR = np.array([0.8, 0.6, 0.0], dtype=np.float32)


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def cache(database):
    made = AnswerCache(database, 10**6)
    put(made, STORED, "2 kg")
    return made


def near_counts(cache):
    """Returns how many near questions wait for a verdict, were confirmed, and were refuted."""
    totals = cache.totals()
    return totals.near_waiting, totals.near_confirmed, totals.near_refuted


def put(cache, question, text, vector=EAST):
    assert cache.put(question, vector, SETTINGS, text, [], AnswerProvenance(frozenset({"v"}), ("v:0",), 0))


def miss(cache, question=ASKED, vector=NEAR):
    found, (near,) = cache.look_up(question, lambda: vector, SETTINGS, 0.85)
    assert found is None
    return near


def judged(cache, agreed, score=0.8, kind="wording", answer=None):
    """Add verdicts about the stored answer or another one."""
    for each in agreed:
        cache._near.judge(answer or 10**6, f"question {next(NUMBERS)}", kind, score, each)


def test_a_near_question_is_found_but_not_as_the_same(cache):
    near = miss(cache)
    assert (near.answer.question, near.answer.text, near.kind) == (STORED, "2 kg", "wording")
    assert near.score == near.answer.similarity == pytest.approx(0.8)
    assert cache.find(ASKED, lambda: NEAR, SETTINGS, 0.85) is None


def test_a_verdict_comes_from_the_own_answer_once(cache):
    cache.remember(ASKED, SETTINGS, miss(cache))
    assert near_counts(cache) == (1, 0, 0)
    cache.judge(f"  {ASKED} ", SETTINGS, lambda stored: stored == "2 kg")
    cache.judge(ASKED, SETTINGS, lambda stored: stored == "2 kg")
    assert near_counts(cache) == (0, 1, 0)


def test_an_answer_that_was_replaced_since_is_not_judged(cache):
    cache.remember(ASKED, SETTINGS, miss(cache))
    put(cache, STORED, "3 kg")
    cache.judge(ASKED, SETTINGS, lambda stored: False)
    assert near_counts(cache) == (0, 0, 0)


def test_near_misses_go_with_the_answer(cache):
    cache.remember(ASKED, SETTINGS, miss(cache))
    cache.delete([STORED])
    assert near_counts(cache) == (0, 0, 0)


def test_a_near_miss_of_an_answer_that_is_gone_is_not_remembered(cache):
    near = miss(cache)
    cache.delete([STORED])
    cache.remember(ASKED, SETTINGS, near)
    assert near_counts(cache) == (0, 0, 0)


def test_a_question_that_is_judged_again_counts_once(cache):
    for agreed, counts in ((True, (0, 1, 0)), (False, (0, 0, 1))):
        cache.remember(ASKED, SETTINGS, miss(cache))
        cache.judge(ASKED, SETTINGS, lambda stored, agreed=agreed: agreed)
        assert near_counts(cache) == counts


def test_only_so_many_are_remembered_the_latest(cache, monkeypatch):
    monkeypatch.setattr("kvweave.answer_cache.near_misses._MOST_REMEMBERED", 2)
    near = miss(cache)
    for number in range(4):
        made_at = near.answer.made_at_s - number
        each = replace(near, answer=replace(near.answer, made_at_s=made_at))
        cache.remember(f"{ASKED} {number}", SETTINGS, each)
    assert near_counts(cache)[0] == 2
    assert cache._near.take(cache_key(), f"{ASKED} 3") != []


def cache_key():
    return SETTINGS.cache_key()


def test_an_answer_is_given_once_enough_like_it_were_right(cache):
    near = miss(cache)
    assert not cache.may_serve(near, 0.05)
    judged(cache, [True] * 80)
    assert not cache.may_serve(near, 0.05)
    judged(cache, [True])
    assert cache.may_serve(near, 0.05)
    assert not cache.may_serve(near, 0.04)
    assert not cache.may_serve(near, 0.0)
    assert not cache.may_serve(NearMiss(near.answer, "keywords", near.score), 0.05), "each kind for itself"
    assert not cache.may_serve(replace(near, score=0.7), 0.05), "less near than what was judged"


def test_an_answer_that_was_wrong_is_not_given_to_what_is_no_nearer(cache):
    near = miss(cache)
    judged(cache, [True] * 400)
    judged(cache, [False], answer=near.answer.id, score=0.7)
    assert cache.may_serve(near, 0.05)
    judged(cache, [False], answer=near.answer.id, score=0.85)
    assert not cache.may_serve(near, 0.05)


def test_the_least_score_is_the_lowest_that_keeps_the_bound():
    right, wrong = Verdict(0.91, True), Verdict(0.65, False)
    assert least_score([right] * 100, 0.05) == 0.91, "nothing is known below"
    assert least_score([right] * 100 + [wrong] * 10, 0.05) == 0.91
    assert least_score([Verdict(0.82, True)] * 90 + [right] * 60 + [wrong] * 10, 0.05) == 0.82
    assert least_score([right] * 80, 0.05) is None
    assert least_score([Verdict(0.95, False)] * 3 + [right] * 100, 0.05) is None
    assert least_score([right] * 409, 0.01) is None
    assert least_score([right] * 410, 0.01) is not None


def test_the_bound_is_kept_however_often_it_is_asked():
    """Where 5 % of answers are wrong at any score, a bound of 0.05 ever gives one in at most about 5 % of streams."""
    chosen = np.random.default_rng(0)
    gave = 0
    for _ in range(120):
        verdicts = [
            Verdict(float(score), bool(right))
            for score, right in zip(chosen.uniform(0.5, 0.95, 400), chosen.random(400) > 0.05, strict=True)
        ]
        gave += any(least_score(verdicts[:known], 0.05) is not None for known in range(80, 401, 10))
    assert gave <= 12


class TestNeighbours:
    """The vectors in memory follow the table."""

    def found(self, cache, vector, most=5):
        return [
            (answer.question, round(cosine, 3))
            for answer, cosine in cache._entries.neighbours("", vector, SETTINGS, most, 0.4)
        ]

    def test_they_are_the_nearest_answered_questions(self, cache):
        put(cache, "Who leads it?", "Anna", NEAR)
        cache.add_predicted("Who is late?", NEAR, SETTINGS)
        assert self.found(cache, EAST) == [(STORED, 1.0), ("Who leads it?", 0.8)]
        assert self.found(cache, EAST, most=1) == [(STORED, 1.0)]
        assert self.found(cache, np.array([0, 0, 1], dtype=np.float32)) == []

    def test_what_came_in_changed_or_went_since_is_known(self, cache):
        assert len(self.found(cache, EAST)) == 1
        put(cache, "Who leads it?", "Anna", NEAR)
        put(cache, STORED, "3 kg", NEAR)
        assert self.found(cache, NEAR) == [("Who leads it?", 1.0), (STORED, 1.0)]
        cache.delete([STORED])
        put(cache, "Who is late?", "Ben", EAST)
        assert self.found(cache, EAST) == [("Who is late?", 1.0), ("Who leads it?", 0.8)]
        cache.clear()
        assert self.found(cache, EAST) == []

    def test_another_process_adds_to_them(self, cache, database):
        assert len(self.found(cache, EAST)) == 1
        other = Database(database.path)
        put(AnswerCache(other, 10**6), "Who leads it?", "Anna", NEAR)
        other.close()
        assert len(self.found(cache, EAST)) == 2
