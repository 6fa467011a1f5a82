"""The bank itself: what it keeps, for how long, beside whom."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerSettings, Provenance
from kvweave.database import Database
from kvweave.errors import StoreError
from kvweave.types import Source

HOW = AnswerSettings("reuse", None, None, 4, None, False, None, None)
WHO = "Who paid Anna?"


def vector(*numbers):
    made = np.array(numbers or (1.0, 0.0, 0.0), dtype=np.float32)
    return made / np.linalg.norm(made)


def rests_on(*versions, epoch=0):
    return Provenance(
        frozenset(versions or ("v1",)), tuple(f"{version}:0" for version in versions or ("v1",)), epoch
    )


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def bank(database):
    return AnswerCache(database, 10**6)


class TestNearest:
    def test_it_is_the_nearest_answered_one_whatever_it_asks_for(self, bank):
        put(bank, "Who paid Anna?", "Ben", vector(1, 0, 0))
        put(bank, "Who did not pay Carl?", "Dan", vector(1, 1, 0))
        bank.expect("Who paid Eve?", vector(1, 0.9, 0), HOW)  # has no answer yet
        nearest = bank.nearest(vector(1, 0.8, 0), HOW, 0.85)
        assert (nearest.question, nearest.text) == ("Who did not pay Carl?", "Dan")
        assert nearest.similarity == pytest.approx(float(vector(1, 0.8, 0) @ vector(1, 1, 0)))

    def test_none_is_near_enough_or_of_the_same_circumstances(self, bank):
        assert bank.nearest(vector(1, 0, 0), HOW, 0.85) is None
        put(bank, at=vector(1, 0, 0))
        assert bank.nearest(vector(0, 1, 0), HOW, 0.85) is None
        assert bank.nearest(vector(1, 0, 0), replace(HOW, recipe="full"), 0.85) is None

    def test_those_used_last_are_compared(self, bank, monkeypatch):
        monkeypatch.setattr("kvweave.answer_cache.cache._COMPARED", 1)
        put(bank, "Who paid Anna?", "Ben", vector(1, 0, 0))
        put(bank, "Who paid Carl?", "Dan", vector(0, 1, 0))
        assert bank.nearest(vector(1, 0, 0), HOW, 0.85) is None
        assert bank.nearest(vector(0, 1, 0), HOW, 0.85).text == "Dan"

    def test_an_answer_of_a_document_that_is_gone_is_no_draft(self, bank):
        put(bank, at=vector(1, 0, 0), provenance=rests_on("v1"))
        bank.documents_changed(gone=["v1"])
        assert bank.nearest(vector(1, 0, 0), HOW, 0.85) is None


def put(bank, question=WHO, text="Ben", at=None, provenance=None, how=HOW):
    sources = [Source("/a.txt", 0, 4, "Ben paid Anna.", 0.5)]
    return bank.put(question, vector() if at is None else at, how, text, sources, provenance or rests_on())


def find(bank, question=WHO, at=None, threshold=0.85, how=HOW):
    return bank.find(question, lambda: vector() if at is None else at, how, threshold)


def test_an_answer_comes_back_as_it_was(bank):
    at = vector(0.3, -0.2, 0.9)
    assert put(bank, at=at, provenance=rests_on("v1", "v2"))
    found = find(bank)
    assert (found.question, found.text, found.circumstances) == (WHO, "Ben", HOW)
    assert found.sources == (Source("/a.txt", 0, 4, "Ben paid Anna.", 0.5),)
    assert set(found.chunks) == {"v1:0", "v2:0"}
    assert found.similarity == 1
    np.testing.assert_array_equal(found.vector, at)
    assert abs(found.made_at_s - time.time()) < 60


def test_the_same_words_need_no_vector(bank):
    put(bank)
    assert bank.find("  Who paid   Anna? ", None, HOW, 1.0).text == "Ben"


def test_a_paraphrase_must_be_near_as_well(bank):
    put(bank, at=vector(1, 0, 0))
    near, far = vector(1, 0.5, 0), vector(1, 0.7, 0)
    assert find(bank, "By whom was Anna paid?", near).similarity == pytest.approx(float(near[0]))
    assert find(bank, "By whom was Anna paid?", far) is None
    assert find(bank, "By whom was Anna paid?", far, threshold=0.8).text == "Ben"


def test_a_look_alike_never_matches_however_near(bank):
    put(bank)
    for other in ("Who did Anna pay?", "Who paid Hannah?", "Who has not paid Anna?", "When was Anna paid?"):
        assert find(bank, other, threshold=0.0) is None


def test_the_nearest_of_several_is_given(bank):
    put(bank, "By whom was Anna paid?", "far", at=vector(1, 0.6, 0))
    put(bank, WHO, "near", at=vector(1, 0.1, 0))
    assert find(bank, "Do you know who paid Anna?", vector(1, 0, 0)).text == "near"


@pytest.mark.parametrize("other", [{"ratio": 0.2}, {"kv_budget": 0.15}])
def test_other_circumstances_are_another_bank(bank, other):
    put(bank)
    assert find(bank, how=replace(HOW, **other)) is None


def test_a_new_answer_replaces_the_old(bank):
    put(bank, provenance=rests_on("v1"))
    put(bank, text="Carl", provenance=rests_on("v2"))
    assert find(bank).text == "Carl"
    assert bank.totals().questions == 1
    bank.documents_changed(["v1"])  # what the old answer rested on
    assert find(bank).text == "Carl"


def test_empty_answers_and_those_of_today_are_not_kept(bank):
    assert not put(bank, text="")
    assert not put(bank, "Who paid Anna today?")
    assert bank.totals().questions == 0


def test_a_change_drops_exactly_the_answers_that_rest_on_it(bank):
    put(bank, "Who paid Anna?", "Ben", provenance=rests_on("v1", "v2"))
    put(bank, "Who paid Carl?", "Dora", provenance=rests_on("v2"))
    put(bank, "Who paid Emil?", "Fritz", provenance=rests_on("v3"))
    assert bank.documents_changed(["v2"]) == 2
    assert [find(bank, f"Who paid {name}?") is None for name in ("Anna", "Carl", "Emil")] == [
        True,
        True,
        False,
    ]
    assert {waiting.question for waiting in bank.waiting()} == {"Who paid Anna?", "Who paid Carl?"}
    assert bank.documents_changed(["v2"]) == 0
    assert bank.epoch == 2


def test_a_change_that_is_rolled_back_changes_nothing(bank, database):
    put(bank)

    class Stop(Exception):
        pass

    def stopped():
        with database.transaction():
            bank.documents_changed(["v1"])
            raise Stop

    with pytest.raises(Stop):
        stopped()
    assert find(bank).text == "Ben"
    assert bank.epoch == 0


def test_answers_of_an_earlier_epoch_are_to_be_looked_at(bank):
    put(bank, provenance=rests_on("v1", epoch=0))
    assert list(bank.unseen()) == []
    bank.documents_changed()
    (unseen,) = bank.unseen()
    assert unseen.question == WHO
    bank.still_best(unseen, bank.epoch)
    assert list(bank.unseen()) == []
    bank.stale(unseen)
    assert find(bank) is None
    assert [waiting.why for waiting in bank.waiting()] == ["stale"]


def test_a_question_given_anothers_answer_waits_once_and_keeps_its_own_later(bank):
    put(bank)
    other = "By whom was Anna paid?"
    for _ in range(2):
        bank.given(find(bank, other), other, vector)
    (waiting,) = bank.waiting()
    assert (waiting.question, waiting.circumstances, waiting.why) == (other, HOW, "matched")
    assert bank.totals().given == 2
    put(bank, other, "Ben, in cash")
    assert bank.waiting() == []
    assert find(bank, other).text == "Ben, in cash"
    assert find(bank).text == "Ben"


def test_it_holds_its_cap_and_drops_the_least_used(database):
    bank = AnswerCache(database, 8_000)
    put(bank, "Who paid Anna?", "Ben")
    for _ in range(3):
        bank.given(find(bank), WHO, vector)
    for number in range(15):
        put(bank, f"Who paid for table {number}?", "x" * 200)
        totals = bank.totals()
        assert totals.bytes <= totals.limit_bytes
    assert 3 < bank.totals().questions < 15
    assert find(bank).text == "Ben"
    assert find(bank, "Who paid for table 14?") is not None
    assert find(bank, "Who paid for table 0?") is None


def test_what_was_popular_once_goes_in_the_end(database):
    bank = AnswerCache(database, 5_000)
    put(bank, "Who paid Anna?", "Ben")
    for _ in range(2):
        bank.given(find(bank), WHO, vector)
    for number in range(50):  # none of them used more than once
        put(bank, f"Who paid for table {number}?", "x" * 200)
    assert find(bank) is None


def test_what_is_larger_than_the_cap_is_not_kept(database):
    bank = AnswerCache(database, 2_000)
    put(bank, text="x" * 5_000)
    assert bank.totals().bytes <= 2_000
    assert find(bank) is None


def test_a_dropped_answer_gives_its_room_back(bank):
    put(bank, text="x" * 5_000)
    full = bank.totals().bytes
    bank.documents_changed(["v1"])
    left = bank.totals().bytes
    assert 0 < left < full - 5_000
    put(bank, text="y" * 5_000)
    assert bank.totals().bytes == full


def test_a_cap_of_nothing_keeps_and_gives_nothing(database):
    put(AnswerCache(database, 10**6))
    without = AnswerCache(database, 0)
    assert not put(without, "Who paid Carl?")
    assert find(without) is None


def test_it_outlives_its_process_and_readings_of_another_version(bank, database):
    put(bank)
    database.execute("UPDATE bank_facts SET value = -1 WHERE name = 'readings'")
    database.execute("UPDATE banked_questions SET reading = 'of another version'")
    again = AnswerCache(Database(database.path), 10**6)
    assert find(again, "By whom was Anna paid?").text == "Ben"


def test_a_closed_database_is_told(bank, database):
    database.close()
    with pytest.raises(StoreError, match="closed"):
        find(bank)


def test_clearing_forgets_every_question_and_no_change(bank):
    put(bank)
    bank.documents_changed()
    bank.clear()
    assert bank.totals().questions == 0
    assert bank.epoch == 1


def test_threads_may_put_and_find_at_once(bank):
    errors = []

    def work(name):
        try:
            for number in range(5):
                put(bank, f"Who paid {name} for table {number}?", f"{name} {number}")
                assert find(bank, f"Who paid {name} for table {number}?").text == f"{name} {number}"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("Anna", "Ben", "Carl")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bank.totals().questions == 15


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_answer_bank import AnswerCache, Database, put, rests_on
bank = AnswerCache(Database(Path({path!r})), 10**6)
number = 0
while True:
    put(bank, f"Who paid for table {{number}}?", "x" * 50, provenance=rests_on("a", "b", "c"))
    number += 1
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_answers(bank, database):
    code = WRITER.format(tests=os.path.dirname(__file__), path=str(database.path))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        written = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert bank.totals().answered >= written
    rows = database.query("SELECT count(*) FROM answer_versions")[0][0]
    assert rows == 3 * bank.totals().answered  # no answer without all that it rests on
    assert bank.documents_changed(["b"]) == bank.totals().questions
    assert bank.totals().answered == 0
