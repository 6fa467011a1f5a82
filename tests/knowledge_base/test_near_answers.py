"""An answer to a question that is near but not certainly the same is given only after both checks, and is judged later."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answering.agreement import agree
from kvweave.answering.cached_answers import CachedAnswers, KeptAnswer, chunk_names
from kvweave.background.contradictions import Contradictions
from kvweave.database import Database, FactTable
from kvweave.index.search import FoundChunk, SearchReason
from kvweave.options import AskOptions

SETTINGS = AskOptions("weave", 5)
STORED, ASKED = "Who lends the amplifier to the band?", "Who is giving the musicians a loan of the amp?"
EAST, NEAR = np.array([[1, 0], [0.8, 0.6]], dtype=np.float32)


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


def chunk(name, text):
    return FoundChunk(name, f"{name}.txt", 0, 0, len(text), text, 1.0, SearchReason(1, None, 1, 0.5))


OWN, OTHER = chunk("a", "The amplifier comes from Ben, 2 kg of it."), chunk("b", "The shed is open.")


@pytest.fixture
def index():
    made = Index()
    made.chunks = [OWN, OTHER]
    return made


@pytest.fixture
def cached(tmp_path, index):
    """A cache with one answer, whose kind of near misses was right 90 times; bound 0.05."""
    with closing(Database(tmp_path / "answers.sqlite")) as database:
        made = CachedAnswers(AnswerCache(database, 10**7), Documents(), lambda: index, 0.85, error_bound=0.05)
        keep(made, STORED, "2 kg", EAST)
        for number in range(90):
            made.answers._near.judge(10**6, str(number), "wording", 0.8, True)
        yield made


def keep(cached, question, text, vector):
    origin = AnswerProvenance(frozenset("a"), chunk_names([OWN]), cached.answers.epoch)
    cached.keep(question, vector, SETTINGS, KeptAnswer(text, ()), origin)


def find(cached, question=ASKED, vector=NEAR):
    found = cached.find(question, lambda: vector, SETTINGS)
    return found and found.text


def counts(cached):
    return cached.answers._near.counts()


def test_an_answer_that_passes_both_checks_is_given_and_judged_by_the_questions_own(cached):
    assert find(cached) == "2 kg"
    assert counts(cached) == (1, 90, 0)
    keep(cached, ASKED, "They weigh 2 kg.", NEAR)
    assert counts(cached) == (0, 91, 0)
    assert find(cached) == "They weigh 2 kg."


def test_what_is_read_alike_but_is_far_needs_the_evidence_alone(cached, index):
    keep(cached, "When is the retest?", "on 3 May", EAST)
    index.chunks = [chunk("a", "The retest is on 3 May."), OTHER]
    asked = "Is the date of the retest known?"
    assert find(cached, asked) == "on 3 May"
    assert counts(cached) == (1, 90, 0)
    index.chunks = [OTHER]
    assert find(cached, asked) is None
    index.chunks = [chunk("a", "Yes, the retest is on 3 May."), OTHER]
    assert find(replace(cached, error_bound=0.0), asked) is None
    for answer in ("Yes.", "Yes, the time of the test is stated."):
        keep(cached, "Is the time of the test stated?", answer, EAST)
        for vector in (NEAR, EAST):
            assert find(cached, "When is the test?", vector) is None
            assert find(cached, "is the time of the test stated", vector) == answer


def test_what_is_read_alike_is_not_given_again_where_it_was_wrong(cached, index):
    keep(cached, "When is the retest?", "on 3 May", EAST)
    index.chunks = [chunk("a", "The retest is on 3 May."), OTHER]
    asked = "Is the date of the retest known?"
    assert find(cached, asked) == "on 3 May"
    keep(cached, asked, "on 7 June", NEAR)
    assert counts(cached) == (0, 90, 1)
    assert find(cached, "Is the date of the retest given?", NEAR) != "on 3 May"


def test_a_wrong_answer_is_not_given_again(cached):
    assert find(cached) == "2 kg"
    keep(cached, ASKED, "3 kg", NEAR)
    assert counts(cached) == (0, 90, 1)
    assert find(cached, "Who has given the players a loan of this amp?", NEAR) is None


def test_what_the_question_retrieves_must_hold_the_answer(cached, index):
    for chunks in ([OTHER], [chunk("a", "The amplifier is brown."), OTHER], [chunk("b", OWN.text)]):
        index.chunks = chunks
        assert find(cached) is None
    assert counts(cached)[0] == 1, "it is remembered all the same"


def test_without_a_bound_nothing_is_given_but_all_is_judged(tmp_path, index):
    with closing(Database(tmp_path / "others.sqlite")) as database:
        cached = CachedAnswers(AnswerCache(database, 10**7), Documents(), lambda: index, 0.85)
        keep(cached, STORED, "2 kg", EAST)
        assert find(cached) is None
        keep(cached, ASKED, "2 kg", NEAR)
        assert counts(cached) == (0, 1, 0)


def test_an_answer_that_newer_documents_made_invalid_is_not_given(cached, index):
    index.chunks = [chunk("b", "The amplifier comes from Carl, 3 kg of it.")]
    cached.answers.documents_changed()
    assert find(cached) is None


def test_a_typing_error_that_is_a_word_of_the_documents_is_none(cached, index):
    typed = "Who lends the amplifeir to the band?"
    assert find(cached, typed, EAST) == "2 kg"
    index.chunks = [OWN, chunk("b", "An amplifeir is a fruit.")]
    assert find(cached, typed, EAST) is None
    wider = replace(SETTINGS, top_k=SETTINGS.top_k + 1)
    index.chunks[1] = replace(index.chunks[1], reason=SearchReason(None, None, 1, 0.1))  # bears on nothing
    assert cached.find(typed, lambda: EAST, wider) is None
    index.chunks = [OWN]
    assert cached.find(typed, lambda: EAST, wider).text == "2 kg"


def test_only_answers_to_the_same_question_in_other_words_contradict_each_other(cached, index):
    contradictions = Contradictions(cached, FactTable(cached.answers._database, "idle_facts"))
    typed, looked = "Who lends the amplifeir to the band?", []
    assert cached.answers.matcher.key(typed) != cached.answers.matcher.key(STORED)
    keep(cached, ASKED, "3 kg", NEAR)
    assert contradictions.groups(lambda: looked.append(1)) == [], "a near question may ask for something else"
    keep(cached, typed, "4 kg", EAST)
    for _ in range(2):  # until it is settled
        ((older, newer),) = contradictions.groups(lambda: looked.append(1))
        assert (older.question, newer.question) == (STORED, typed)
    index.chunks = [OWN, chunk("b", "An amplifeir is a fruit.")]
    assert contradictions.groups() == []
    assert contradictions.groups(lambda: looked.append(1)) == []
    assert len(looked) == 2 + (1 + 2) + (1 + 2), (
        "each answer once, unless a contradiction was found; then its group too"
    )


def test_a_word_that_may_be_an_error_of_two_words_is_none_where_the_documents_have_both(cached, index):
    keep(cached, "When is the internal audit?", "3 May", EAST)
    assert find(cached, "When is the inernal audit?", EAST) == "3 May"
    index.chunks = [OWN, chunk("b", "The infernal audit is held by devils.")]
    assert find(cached, "When is the inernal audit?", EAST) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2 kg", "They weigh 2 kg.", True),
        ("2 kg", "3 kg", False),
        ("Yes.", "No.", False),
        ("Anna", "The text does not say.", False),
        ("It is not stated.", "It is not stated.", False),
        ("", "", False),
        ("the red boat of Anna", "Anna's red boat", True),
        ("forty crowns for each of the two boats", "fifty crowns for each of the two boats", False),
        ("forty crowns", "fifty crowns", False),
        ("The shop is open on Sundays.", "The shop is closed on Sundays.", False),
        ("The shop in the village is open Sunday.", "The shop in the village is open Monday.", False),
        ("All of the doors of the hall are locked.", "All of the doors of the hall are unlocked.", False),
    ],
)
def test_answers_agree_if_they_say_the_same(one, other, same):
    assert agree(one, other) is agree(other, one) is same
