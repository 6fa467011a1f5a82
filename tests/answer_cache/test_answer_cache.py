"""What the answer cache stores, for how long, and with several users at once."""

import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.database import Database
from kvweave.errors import StoreError
from kvweave.options import AskOptions
from kvweave.results import Source
from support.processes import Program

SETTINGS = AskOptions("reuse", 4)
WHO = "Who paid Anna?"


def vector(*numbers):
    made = np.array(numbers or (1.0, 0.0, 0.0), dtype=np.float32)
    return made / np.linalg.norm(made)


def made_from(*versions, epoch=0):
    return AnswerProvenance(
        frozenset(versions or ("v1",)), tuple(f"{version}:0" for version in versions or ("v1",)), epoch
    )


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def cache(database):
    return AnswerCache(database, 10**6)


class TestNearest:
    def test_it_is_the_nearest_answered_question_even_if_it_asks_for_something_else(self, cache):
        put(cache, "Who paid Anna?", "Ben", vector(1, 0, 0))
        put(cache, "Who did not pay Carl?", "Dan", vector(1, 1, 0))
        cache.add_predicted("Who paid Eve?", vector(1, 0.9, 0), SETTINGS)  # has no answer yet
        nearest = cache.nearest(vector(1, 0.8, 0), SETTINGS, 0.85)
        assert (nearest.question, nearest.text) == ("Who did not pay Carl?", "Dan")
        assert nearest.similarity == pytest.approx(float(vector(1, 0.8, 0) @ vector(1, 1, 0)))

    def test_none_is_near_enough_or_of_the_same_settings(self, cache):
        assert cache.nearest(vector(1, 0, 0), SETTINGS, 0.85) is None
        put(cache, at=vector(1, 0, 0))
        assert cache.nearest(vector(0, 1, 0), SETTINGS, 0.85) is None
        assert cache.nearest(vector(1, 0, 0), replace(SETTINGS, recipe="full"), 0.85) is None

    def test_few_letters_make_no_question_near(self, cache):
        put(cache, "Why?", "Because.", vector(1, 0, 0))
        assert cache.nearest(vector(0, 1, 0), SETTINGS, 0.85) is None

    def test_an_answer_from_a_removed_document_is_not_found(self, cache):
        put(cache, at=vector(1, 0, 0), provenance=made_from("v1"))
        cache.documents_changed(gone=["v1"])
        assert cache.nearest(vector(1, 0, 0), SETTINGS, 0.85) is None


def put(cache, question=WHO, text="Ben", at=None, provenance=None, settings=SETTINGS):
    sources = [Source("/a.txt", 0, 4, "Ben paid Anna.", 0.5)]
    return cache.put(
        question, vector() if at is None else at, settings, text, sources, provenance or made_from()
    )


def find(cache, question=WHO, at=None, threshold=0.85, settings=SETTINGS):
    return cache.find(question, lambda: vector() if at is None else at, settings, threshold)


def test_a_stored_answer_is_returned_unchanged(cache):
    at = vector(0.3, -0.2, 0.9)
    assert put(cache, at=at, provenance=made_from("v1", "v2"))
    found = find(cache)
    assert (found.question, found.text, found.options) == (WHO, "Ben", SETTINGS)
    assert found.sources == (Source("/a.txt", 0, 4, "Ben paid Anna.", 0.5),)
    assert set(found.chunks) == {"v1:0", "v2:0"}
    assert found.similarity == 1
    np.testing.assert_array_equal(found.vector, at)
    assert abs(found.made_at_s - time.time()) < 60


def test_the_same_words_need_no_vector(cache):
    put(cache)
    assert cache.find("  Who paid   Anna? ", None, SETTINGS, 1.0).text == "Ben"


def test_keywords_get_the_answer_and_a_near_question_does_not(cache):
    put(cache, "What is the battery retest date?", "3 May", at=vector(1, 0, 0))
    near, far = vector(1, 0.5, 0), vector(1, 3, 0)
    assert find(cache, "battery retest date", near).similarity == pytest.approx(float(near[0]))
    assert find(cache, "battery retest date", far) is None
    put(cache, "Who lends the amplifier to the band?", "Ben", at=vector(0, 0, 1))
    asked = "Who is giving the musicians a loan of the amp?"
    assert cache.matcher.compare(asked, "Who lends the amplifier to the band?", 1.0, 0.85).sameness == "near"
    assert find(cache, asked, at=vector(0, 0, 1)) is None


def test_a_look_alike_never_matches_however_near(cache):
    put(cache)
    for other in ("Who did Anna pay?", "Who paid Hannah?", "Who has not paid Anna?", "When was Anna paid?"):
        assert find(cache, other, threshold=0.0) is None


def test_a_stored_question_is_found_by_its_letters_where_errors_move_its_vector_away(cache, database):
    put(cache, "Who is the oldest member of the choir?", "Ben", at=vector(1, 0, 0))
    for number in range(20):
        put(cache, f"Where is hall {number} of the fair?", str(number), at=vector(0, 1, 0))
    typed = "who is teh odlest membr of teh chior"
    assert find(cache, typed, at=vector(0, 1, 0)).text == "Ben"
    reopened = AnswerCache(database, 10**7)
    assert find(reopened, typed, at=vector(0, 1, 0)).text == "Ben"
    put(reopened, "Who is the oldest member of the crew?", "Carl", at=vector(1, 0, 0))
    assert find(reopened, "who is teh odlest mebmer of teh crwe", at=vector(0, 1, 0)).text == "Carl"
    assert find(reopened, "who is teh odlest mebmer of teh club", at=vector(0, 1, 0)) is None


def test_the_nearest_of_several_is_returned(cache):
    put(cache, "Which date has the battery retest?", "far", at=vector(1, 0.6, 0))
    put(cache, "What is the date of the battery retest?", "near", at=vector(1, 0.1, 0))
    assert find(cache, "battery retest date", vector(1, 0, 0)).text == "near"


@pytest.mark.parametrize("other", [{"ratio": 0.2}, {"kv_budget": 0.15}])
def test_an_answer_under_other_settings_is_not_found(cache, other):
    put(cache)
    assert find(cache, settings=replace(SETTINGS, **other)) is None


def test_a_new_answer_replaces_the_old(cache):
    put(cache, provenance=made_from("v1"))
    put(cache, text="Carl", provenance=made_from("v2"))
    assert find(cache).text == "Carl"
    assert cache.totals().questions == 1
    cache.documents_changed(["v1"])  # what the old answer was made from
    assert find(cache).text == "Carl"


def test_empty_and_time_sensitive_answers_are_not_stored(cache):
    assert not put(cache, text="")
    assert not put(cache, "Who paid Anna today?")
    assert cache.totals().questions == 0


def test_a_change_drops_exactly_the_answers_made_from_it(cache):
    put(cache, "Who paid Anna?", "Ben", provenance=made_from("v1", "v2"))
    put(cache, "Who paid Carl?", "Dora", provenance=made_from("v2"))
    put(cache, "Who paid Emil?", "Fritz", provenance=made_from("v3"))
    assert cache.documents_changed(["v2"]) == 2
    assert [find(cache, f"Who paid {name}?") is None for name in ("Anna", "Carl", "Emil")] == [
        True,
        True,
        False,
    ]
    assert {pending.question for pending in cache.pending()} == {"Who paid Anna?", "Who paid Carl?"}
    assert cache.documents_changed(["v2"]) == 0
    assert cache.epoch == 2


def test_a_change_that_is_rolled_back_changes_nothing(cache, database):
    put(cache)

    class Stop(Exception):
        pass

    def stopped():
        with database.transaction():
            cache.documents_changed(["v1"])
            raise Stop

    with pytest.raises(Stop):
        stopped()
    assert find(cache).text == "Ben"
    assert cache.epoch == 0


def test_answers_of_an_earlier_epoch_are_unchecked(cache):
    put(cache, provenance=made_from("v1", epoch=0))
    assert list(cache.unchecked()) == []
    cache.documents_changed()
    (unchecked,) = cache.unchecked()
    assert unchecked.question == WHO
    cache.confirm(unchecked, cache.epoch)
    assert list(cache.unchecked()) == []
    cache.invalidate(unchecked)
    assert find(cache) is None
    assert [pending.reason for pending in cache.pending()] == ["stale"]


def test_a_question_given_anothers_answer_is_pending_once_and_gets_its_own_later(cache):
    put(cache)
    other = "who paid anna"
    for _ in range(2):
        cache.record_hit(find(cache, other), other, vector)
    (pending,) = cache.pending()
    assert (pending.question, pending.options, pending.reason) == (other, SETTINGS, "matched")
    assert cache.totals().given == 2
    put(cache, other, "Ben, in cash")
    assert cache.pending() == []
    assert find(cache, other).text == "Ben, in cash"
    assert find(cache).text == "Ben"


def test_the_cap_holds_and_the_least_used_are_evicted(database):
    cache = AnswerCache(database, 8_000)
    put(cache, "Who paid Anna?", "Ben")
    for _ in range(3):
        cache.record_hit(find(cache), WHO, vector)
    for number in range(15):
        put(cache, f"Who paid for table {number}?", "x" * 200)
        totals = cache.totals()
        assert totals.bytes <= totals.limit_bytes
    assert 3 < cache.totals().questions < 15
    assert find(cache).text == "Ben"
    assert find(cache, "Who paid for table 14?") is not None
    assert find(cache, "Who paid for table 0?") is None


def test_a_question_that_was_popular_once_is_evicted_in_the_end(database):
    cache = AnswerCache(database, 5_000)
    put(cache, "Who paid Anna?", "Ben")
    for _ in range(2):
        cache.record_hit(find(cache), WHO, vector)
    for number in range(50):  # none of them used more than once
        put(cache, f"Who paid for table {number}?", "x" * 200)
    assert find(cache) is None


def test_an_answer_larger_than_the_cap_is_not_stored(database):
    cache = AnswerCache(database, 2_000)
    put(cache, text="x" * 5_000)
    assert cache.totals().bytes <= 2_000
    assert find(cache) is None


def test_a_dropped_answer_frees_its_bytes(cache):
    put(cache, text="x" * 5_000)
    full = cache.totals().bytes
    cache.documents_changed(["v1"])
    left = cache.totals().bytes
    assert 0 < left < full - 5_000
    put(cache, text="y" * 5_000)
    assert cache.totals().bytes == full


def test_a_cap_of_zero_stores_and_returns_nothing(database):
    put(AnswerCache(database, 10**6))
    without = AnswerCache(database, 0)
    assert not put(without, "Who paid Carl?")
    assert find(without) is None


def test_the_cache_is_reopened_and_keys_of_another_version_are_recomputed(cache, database):
    put(cache)
    database.execute("UPDATE bank_facts SET value = -1 WHERE name = 'readings'")
    database.execute("UPDATE banked_questions SET reading = 'of another version'")
    again = AnswerCache(Database(database.path), 10**6)
    assert find(again, "who paid anna").text == "Ben"


def test_a_closed_database_raises(cache, database):
    database.close()
    with pytest.raises(StoreError, match="closed"):
        find(cache)


def test_clearing_deletes_every_question_and_keeps_the_epoch(cache):
    put(cache)
    cache.documents_changed()
    cache.clear()
    assert cache.totals().questions == 0
    assert cache.epoch == 1


def test_threads_may_put_and_find_at_once(cache):
    errors = []

    def work(name):
        try:
            for number in range(5):
                put(cache, f"Who paid {name} for table {number}?", f"{name} {number}")
                assert find(cache, f"Who paid {name} for table {number}?").text == f"{name} {number}"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("Anna", "Ben", "Carl")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.totals().questions == 15


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_answer_cache import AnswerCache, Database, put, made_from
cache = AnswerCache(Database(Path({path!r})), 10**6)
number = 0
while True:
    put(cache, f"Who paid for table {{number}}?", "x" * 50, provenance=made_from("a", "b", "c"))
    number += 1
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_answers(cache, database):
    code = WRITER.format(tests=os.path.dirname(__file__), path=str(database.path))
    with Program(["-c", code]) as writer:
        for _ in range(3):
            written = int(writer.stdout.readline())
        writer.kill()
    assert cache.totals().answered >= written
    rows = database.query("SELECT count(*) FROM answer_versions")[0][0]
    assert rows == 3 * cache.totals().answered  # every answer has all its versions
    assert cache.documents_changed(["b"]) == cache.totals().questions
    assert cache.totals().answered == 0


class TestPromotionIntoAFullCache:
    A, B, C = "Who paid Anna?", "When does the library close?", "How deep is the lake near Bern?"

    @pytest.fixture
    def cache(self, database):
        return AnswerCache(database, 1500)  # two questions with their answers

    def promote(self, cache, question, found):
        return cache.promote(question, vector(0, 1, 0), replace(found, judged=0.9), made_from(), 1.0)

    def test_one_that_is_evicted_at_once_is_not_promoted(self, cache):
        put(cache, self.A)
        put(cache, self.B, "At six", vector(0, 0, 1))
        assert not self.promote(cache, self.C, cache.stored(self.A, SETTINGS))
        assert cache.totals().promoted == 0
        assert cache.stored(self.C, SETTINGS) is None
        assert (
            cache.stored(self.A, SETTINGS).promoted_from == cache.stored(self.B, SETTINGS).promoted_from == ""
        )

    def test_a_no_counts_after_the_question_that_it_was_computed_for_is_evicted(self, cache):
        cache.put(self.A, vector(), SETTINGS, "Ben", [], made_from(), asked=False)
        cache.add_asked(self.B, vector(0, 1, 0), SETTINGS)
        assert self.promote(cache, self.B, cache.stored(self.A, SETTINGS))
        put(cache, self.C, "Ten metres", vector(0, 0, 1))
        assert cache.stored(self.A, SETTINGS) is None
        assert cache.reject(self.B) == [self.A]
        assert cache.stored(self.B, SETTINGS) is None
        assert cache.totals().rejected == 1
