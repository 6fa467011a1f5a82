"""An answer is given to a question with typing errors, unless these are words of the documents."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answering.cached_answers import CachedAnswers, chunk_names
from kvweave.database import Database
from kvweave.index.search import FoundChunk
from kvweave.options import AskOptions
from kvweave.results import SearchReason

SETTINGS = AskOptions("weave", 5)
STORED = "Who lends the amplifier to the band?"
EAST = np.array([1, 0], dtype=np.float32)


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
    """A cache with one answer."""
    with closing(Database(tmp_path / "answers.sqlite")) as database:
        made = CachedAnswers(AnswerCache(database, 10**7), Documents(), lambda: index, 0.85)
        keep(made, STORED, "2 kg", EAST)
        yield made


def keep(cached, question, text, vector):
    origin = AnswerProvenance(frozenset("a"), chunk_names([OWN]), cached.answers.epoch)
    cached.keep(question, vector, SETTINGS, text, (), origin)


def find(cached, question, vector):
    found = cached.find(question, lambda: vector, SETTINGS)
    return found and found.text


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


def test_a_word_that_may_be_an_error_of_two_words_is_none_where_the_documents_have_both(cached, index):
    keep(cached, "When is the internal audit?", "3 May", EAST)
    assert find(cached, "When is the inernal audit?", EAST) == "3 May"
    index.chunks = [OWN, chunk("b", "The infernal audit is held by devils.")]
    assert find(cached, "When is the inernal audit?", EAST) is None
