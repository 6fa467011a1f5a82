"""A near question gets a stored answer only where the passages hold it, the model says so, and nothing has changed."""

import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answering.cached_answers import CachedAnswers, chunk_names
from kvweave.database import Database
from kvweave.errors import InvalidRequest
from kvweave.index.search import FoundChunk
from kvweave.options import AskOptions
from kvweave.results import SearchReason
from kvweave.state.judge import Judge, JudgeFit, JudgeFits, ScoredPair
from support import tiny_kb
from support.processes import run_program

pytestmark = pytest.mark.usefixtures("few_labelled_pairs")

SETTINGS = AskOptions("weave", 5)
STORED, NEAR = "Who lends the amplifier to the band?", "Which person gave the musicians their amplifier?"
EAST = np.array([1, 0], dtype=np.float32)
GOOD = JudgeFit("m", (*[ScoredPair(5.0, True)] * 50, *[ScoredPair(0.0, False)] * 200), 1.0)


class Documents:
    """A list of documents that all are visible."""

    def visible_versions(self):
        return frozenset("ab")


class Index:
    """Finds `chunks`, best first."""

    def __init__(self):
        self.chunks = []

    def search(self, question, vector, k, visible):
        return self.chunks[:k]


class FakeJudge:
    """Says `given`, after `during` has run; counts its passes."""

    def __init__(self, given=6.0, fit=GOOD):
        self.given, self.found, self.passes, self.during = given, fit, 0, lambda: None

    def score(self, one, other):
        assert (one, other) == (STORED, NEAR)
        self.passes += 1
        self.during()
        return self.given


def chunk(name, text):
    return FoundChunk(name, f"{name}.txt", 0, 0, len(text), text, 1.0, SearchReason(1, None, 1, 0.5))


OWN = chunk("a", "The amplifier comes from Ben Marley.")


@pytest.fixture
def index():
    made = Index()
    made.chunks = [OWN]
    return made


@pytest.fixture
def cached(tmp_path, index):
    """A cache with one answer."""
    with closing(Database(tmp_path / "answers.sqlite")) as database:
        made = CachedAnswers(
            AnswerCache(database, 10**7), Documents(), lambda: index, 0.85, error_bound=0.005
        )
        keep(made, "Ben Marley")
        yield made


def keep(cached, text):
    origin = AnswerProvenance(frozenset("a"), chunk_names([OWN]), cached.answers.epoch)
    cached.keep(STORED, EAST, SETTINGS, text, (), origin)


def vector():
    return EAST


def judged(cached, judge, question=NEAR, options=SETTINGS, of=vector):
    return cached.judged(question, of, options, judge)


def find(cached):
    return cached.find(NEAR, vector, SETTINGS)


def test_an_answer_is_given_on_the_judges_word_and_names_its_question(cached):
    assert find(cached) is None
    found = judged(cached, FakeJudge())
    assert (found.text, found.question, found.judged) == ("Ben Marley", STORED, 6.0)
    assert cached.answer(found, 0.0).plan.cache_hit.question == STORED
    assert judged(cached, FakeJudge(given=4.9)) is None


def test_the_judge_is_not_asked_where_the_answer_could_not_be_given_anyway(cached, index):
    judge = FakeJudge()
    assert judged(cached, judge, "Who lends the amplifier to the choir?") is None  # the guard sees it
    assert judged(cached, judge, "Wer leiht der Band den Verstärker?") is None
    assert judged(cached, judge, NEAR + " really" * 200) is None
    assert judged(cached, judge, NEAR, replace(SETTINGS, top_k=4)) is None  # stored under other options
    assert judged(cached, judge, of=lambda: np.array([0.5, 0.75**0.5], dtype=np.float32)) is None
    index.chunks = [chunk("a", "The drum comes from Ben.")]  # the best passages do not hold the answer
    assert judged(cached, judge) is None
    index.chunks = [OWN]
    for text in ("Yes.", "The notes do not say who lends it."):
        keep(cached, text)
        assert judged(cached, judge) is None
    assert judge.passes == 0


def test_nothing_is_given_by_a_model_that_was_not_tried_or_judges_badly(cached):
    assert not cached.answers.has_met_near
    assert judged(cached, FakeJudge(fit=None)) is None
    assert cached.answers.has_met_near  # so that idle time tries it
    bad = FakeJudge(fit=JudgeFit("m", (ScoredPair(5.0, True), ScoredPair(9.0, False)), 1.0))
    assert judged(cached, bad) is None
    assert bad.passes == 0
    assert judged(replace(cached, error_bound=0.0), FakeJudge()) is None


def test_a_document_that_changes_while_the_model_judges_takes_the_answer_with_it(cached):
    judge = FakeJudge()
    judge.during = lambda: cached.answers.documents_changed("a")
    assert judged(cached, judge) is None
    keep(cached, "Ben Marley")
    judge.during = lambda: cached.answers.documents_changed()  # one came in
    assert judged(cached, judge) is None
    judge.during = lambda: None
    assert judged(cached, judge).text == "Ben Marley"


def test_a_judged_answer_is_counted_and_its_question_gets_an_answer_of_its_own(cached):
    cached.record_hit(judged(cached, FakeJudge()), NEAR, vector)
    assert cached.answers.totals().judged == 1
    assert [(each.question, each.reason) for each in cached.answers.pending()] == [(NEAR, "matched")]


def test_a_rejected_answer_is_never_given_again_and_counts(cached):
    cached.record_hit(judged(cached, FakeJudge()), NEAR, vector)
    assert cached.answers.reject(NEAR) == [STORED]
    assert cached.answers.reject(NEAR) == []
    assert find(cached) is None
    judge = FakeJudge()
    assert judged(cached, judge) is None
    keep(cached, "Ben Marley")
    assert judged(cached, judge) is None
    assert judge.passes == 0
    totals = cached.answers.totals()
    assert (totals.judged, totals.rejected) == (1, 1)
    assert cached.answers.rejected_scores() == [6.0]


def test_a_hit_with_a_typing_error_can_be_rejected(cached):
    typed = "Who lends the amplifeir to the band?"
    found = cached.find(typed, vector, SETTINGS)
    cached.record_hit(found, typed, vector)
    assert cached.answers.reject(typed) == [STORED]
    assert cached.find(typed, vector, SETTINGS) is None
    assert cached.find(STORED, vector, SETTINGS) is not None


def test_shared_answers_go_with_the_questions(cached):
    cached.record_hit(judged(cached, FakeJudge()), NEAR, vector)
    cached.answers.delete([STORED])
    assert cached.answers.reject(NEAR) == []


# Ahead of time


@pytest.fixture
def pending(cached):
    """The cache, in which NEAR waits for an answer."""
    cached.answers.add_asked(NEAR, EAST, SETTINGS)
    return cached


def waiting(cached):
    return [(each.question, each.reason) for each in cached.answers.pending()]


def test_a_promoted_question_is_answered_without_a_pass_and_names_whose_answer_it_is(pending):
    judge = FakeJudge()
    assert pending.near(NEAR, vector, SETTINGS, GOOD).found.text == "Ben Marley"
    assert pending.promote(NEAR, SETTINGS, judge)
    assert waiting(pending) == []
    found = find(pending)
    assert (found.text, found.stored_for, found.judged, judge.passes) == ("Ben Marley", STORED, 6.0, 1)
    assert pending.answer(found, 0.0).plan.cache_hit.question == STORED
    pending.record_hit(found, NEAR, vector)
    assert (pending.answers.totals().promoted, pending.answers.totals().promoted_given) == (1, 1)


def test_a_pair_that_was_judged_for_a_user_is_not_judged_again(cached):
    cached.record_hit(judged(cached, FakeJudge()), NEAR, vector)
    judge = FakeJudge()
    assert judged(cached, judge).judged == 6.0
    assert cached.promote(NEAR, SETTINGS, judge)
    assert judge.passes == 0


@pytest.mark.parametrize("given", [4.9, float("nan"), -float("inf")])
def test_nothing_is_promoted_where_the_model_says_no_or_neither(pending, given):
    assert not pending.promote(NEAR, SETTINGS, FakeJudge(given))
    assert find(pending) is None
    assert waiting(pending) == [(NEAR, "asked")]


@pytest.mark.parametrize(
    "question", ["Wer leiht der Band den Verstärker?", NEAR + " really" * 2000, "?", "Which person?"]
)
def test_other_languages_huge_and_empty_questions_are_not_put_to_the_judge(cached, question):
    cached.answers.add_asked(question, EAST, SETTINGS)
    judge = FakeJudge()
    assert cached.near(question, vector, SETTINGS, GOOD) is None
    assert not cached.promote(question, SETTINGS, judge)
    assert judge.passes == 0


def test_a_promoted_answer_goes_with_a_document_of_either_question(pending, index):
    index.chunks = [chunk("b", "Ben Marley lends his amplifier to musicians.")]
    for gone in "ab":
        keep(pending, "Ben Marley")
        assert pending.promote(NEAR, SETTINGS, FakeJudge())
        pending.answers.documents_changed(gone)
        assert find(pending) is None
        assert (NEAR, "changed") in waiting(pending)


def test_a_document_that_changes_while_the_model_judges_keeps_the_answer_from_being_promoted(pending):
    judge = FakeJudge()
    for gone in ((), "a"):
        judge.during = lambda gone=gone: pending.answers.documents_changed(gone)
        assert not pending.promote(NEAR, SETTINGS, judge)
        assert find(pending) is None
        assert (NEAR, "asked") in waiting(pending)


def test_a_promotion_that_fails_halfway_leaves_nothing(pending, tmp_path):
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database, database:
        database.execute(
            "CREATE TRIGGER fails BEFORE INSERT ON promoted_answers BEGIN SELECT RAISE(ABORT, 'killed'); END"
        )
    with pytest.raises(sqlite3.IntegrityError, match="killed"):
        pending.promote(NEAR, SETTINGS, FakeJudge())
    assert find(pending) is None
    assert waiting(pending) == [(NEAR, "asked")]
    assert pending.answers.reject(NEAR) == []


def test_a_promoted_answer_that_is_rejected_is_dropped_for_good(pending):
    pending.promote(NEAR, SETTINGS, FakeJudge())
    assert pending.answers.reject(NEAR) == [STORED]
    assert find(pending) is None
    assert waiting(pending) == [(NEAR, "asked")]
    judge = FakeJudge()
    assert not pending.promote(NEAR, SETTINGS, judge)
    assert judge.passes == 0
    pending.keep(NEAR, EAST, SETTINGS, "Somebody", (), AnswerProvenance(frozenset("a"), (), 0))
    assert find(pending).stored_for == NEAR


# Through the public interface

RIVER, WATER = "Where is the river of note 2?", "In what place does the water of note 2 run?"


@pytest.fixture
def base(tmp_path, tiny, monkeypatch):
    """A knowledge base that has answered RIVER, with a model that says yes to all and was tried."""
    monkeypatch.setattr(Judge, "score", lambda self, one, other: 6.0)
    monkeypatch.setattr("kvweave.answering.cached_answers.is_supported", lambda *given: True)
    (tmp_path / "notes").mkdir()
    for number in range(3):
        (tmp_path / "notes" / f"{number}.txt").write_text(tiny_kb.text(number))
    with tiny_kb.open_tiny(tmp_path / "home", idle_power="any") as kb:
        kb.add(tmp_path / "notes")
        kb.ask(RIVER)
        yield kb


def fit(base):
    JudgeFits(base.config.home).put(base.adapter.fingerprint.digest, GOOD)


def test_asking_in_other_words(base):
    computed = base.ask(WATER, cache="off")
    assert computed.plan.cache_hit is None
    assert computed.timing.judge_s == 0
    fit(base)
    answer = base.ask(WATER)
    assert answer.plan.cache_hit.question == RIVER
    assert answer.plan.cache_hit.judged == 6.0
    assert 0 < answer.timing.judge_s <= answer.timing.ttft_s
    assert base.reject_answer(WATER) == [RIVER]
    again = base.ask(WATER)
    assert again.plan.cache_hit is None
    assert 0 < again.timing.judge_s < again.timing.ttft_s
    with pytest.raises(InvalidRequest, match="no answer of another question"):
        base.reject_answer("Where is the sea?")


def test_idle_time_tries_the_model_once_a_question_needs_it(base, monkeypatch):
    monkeypatch.setattr("kvweave.state.judge._EXAMPLES", (("Who?", "who", False),))  # room is for 512 tokens
    monkeypatch.setattr("kvweave.state.judge._QUESTION", "Same?")
    assert "judging" not in base.idle().jobs
    assert "until" in base.judging()
    assert base.ask(WATER).plan.cache_hit is None
    assert base.idle().jobs["judging"] == 1
    assert "does not judge well enough: AUC 0.50" in base.judging()
    assert "judging" not in base.idle().jobs


def test_idle_time_promotes_a_question_in_place_of_answering_it(base):
    fit(base)
    assert base.ask(WATER).timing.judge_s > 0
    jobs = base.idle().jobs
    assert (jobs["promotion"], jobs.get("answers", 0)) == (1, 0)
    again = base.ask(WATER)
    assert (again.plan.cache_hit.question, again.plan.cache_hit.judged) == (RIVER, 6.0)
    assert again.timing.judge_s == 0
    assert base.answers.totals().promoted_given == 1
    changed = Path(again.sources[0].document)
    changed.write_text(tiny_kb.text(7))
    base.add(changed)
    assert base.ask(WATER).plan.cache_hit is None


def test_a_predicted_question_that_asks_what_is_stored_is_not_answered_again(base):
    fit(base)
    ((_, options),) = base.answers.most_used()
    base.predictions.predicted.add(WATER, "knowledge", [])
    base.answers.add_predicted(WATER, base.encoder.encode([WATER])[0], options)
    jobs = base.idle().jobs
    assert (jobs["promotion"], jobs.get("population", 0)) == (1, 0)
    assert base.ask(WATER).plan.cache_hit.question == RIVER
    assert base.predictions.predicted.totals().given == 1


def test_a_kill_while_promoting_loses_nothing(base):
    fit(base)
    ((_, options),) = base.answers.most_used()
    base.answers.add_asked(WATER, base.encoder.encode([WATER])[0], options)
    code = (
        "import os, signal\n"
        "from kvweave.answering import cached_answers\n"
        "from kvweave.state.judge import Judge\n"
        "from support import tiny_kb\n"
        "tiny_kb.load()\n"
        "cached_answers.is_supported = lambda *given: True\n"
        "Judge.score = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tiny_kb.open_tiny({str(base.config.home)!r}, idle_power='any').idle()\n"
    )
    assert run_program(["-c", code], timeout=1000).returncode == -signal.SIGKILL
    assert [each.question for each in base.answers.pending()] == [WATER]
    assert base.idle().jobs["promotion"] == 1
    assert base.ask(WATER).plan.cache_hit.question == RIVER
    assert base.ask(RIVER).plan.cache_hit.question == RIVER
