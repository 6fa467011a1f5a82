"""An answer is valid while its evidence is the same, however many chunks came in beside it."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answering.cached_answers import CachedAnswers, chunk_names
from kvweave.answering.settings import Settings
from kvweave.config import Config, RetrievalConfig
from kvweave.database import Database
from kvweave.index.search import FoundChunk
from kvweave.options import AskOptions
from kvweave.results import SearchReason

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"
VECTOR = np.eye(4, dtype=np.float32)[0]
SETTINGS = AskOptions("weave", 5)


class Documents:
    """A list of documents that all are visible."""

    def visible_versions(self):
        return frozenset("abcdefgh")


class Index:
    """Finds `chunks`, best first."""

    def __init__(self):
        self.chunks, self.searches = [], 0

    def search(self, question, vector, k, visible):
        self.searches += 1
        return self.chunks[:k]


def chunk(name, word_rank=None, cosine=0.05):
    return FoundChunk(name, f"{name}.txt", 0, 0, 9, "…", 1.0, SearchReason(word_rank, None, 1, cosine))


OWN = [chunk("a", 1, 0.6), chunk("b", 2, 0.4), chunk("c"), chunk("d")]


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def cached(tmp_path, index):
    """An answer cache beside `index`."""
    with closing(Database(tmp_path / "answers.sqlite")) as database:
        yield CachedAnswers(AnswerCache(database, 10**7), Documents(), lambda: index, 0.85)


def keep(cached, chunks, settings=SETTINGS, text="walnut"):
    origin = AnswerProvenance(
        frozenset(each.version for each in chunks), chunk_names(chunks), cached.answers.epoch
    )
    cached.keep(GLORRIC, VECTOR, settings, text, (), origin)


def find(cached, settings=SETTINGS):
    found = cached.find(GLORRIC, lambda: VECTOR, settings)
    return found and found.text


def test_chunks_that_do_not_bear_on_a_question_leave_its_answer_valid(cached, index):
    keep(cached, OWN)
    index.chunks = [*OWN[:3], chunk("e"), OWN[3]]
    cached.answers.documents_changed()
    assert find(cached) == "walnut"
    assert find(cached) == "walnut"
    assert index.searches == 1, "the verdict is stored: one search for each change of the documents"


@pytest.mark.parametrize("new", [chunk("e", word_rank=3), chunk("e", cosine=0.3), chunk("e", cosine=None)])
def test_a_chunk_that_bears_on_the_question_makes_its_answer_invalid_and_pending(cached, index, new):
    keep(cached, OWN)
    index.chunks = [*OWN, new]
    cached.answers.documents_changed()
    assert find(cached) is None
    (waiting,) = cached.answers.pending()
    assert (waiting.question, waiting.options, waiting.reason) == (GLORRIC, SETTINGS, "stale")


def test_answers_stored_under_the_number_of_chunks_there_were_are_found(cached, index):
    few = replace(SETTINGS, top_k=4)
    keep(cached, OWN, few)
    index.chunks = [*OWN, chunk("e")]
    cached.answers.documents_changed()
    assert find(cached) == "walnut"
    assert [settings for _, settings in cached.answers.most_used()] == [SETTINGS]
    assert cached.answers.totals().questions == 1


def test_a_smaller_answer_is_not_given_where_more_chunks_bear_on_the_question(cached, index):
    few = replace(SETTINGS, top_k=2)
    keep(cached, OWN[:2], few)
    index.chunks = [*OWN[:2], chunk("e", word_rank=3)]
    assert find(cached) is None
    assert find(cached, few) == "walnut", "it stays the answer to a request for two chunks"


def test_another_reranker_is_another_answer(cached, index, tmp_path):
    names = [None, "cross"]
    configs = [Config(tmp_path, retrieval=RetrievalConfig(reranker=name), recipe="reuse") for name in names]
    kinds = [Settings(config, tmp_path).options() for config in configs]
    for settings, name in zip(kinds, names, strict=True):
        keep(cached, OWN, settings, text=str(name))
    assert [find(cached, settings) for settings in kinds] == ["None", "cross"]
    cached.answers.documents_changed()
    assert [found.text for found in cached.unchecked()] == ["None"], "another reranker's answers wait for it"


def test_growing_a_small_knowledge_base_orphans_no_question(open_kb, documents):
    base = open_kb(answer_limit_bytes=10**7, top_k=5, idle_power="any")
    base.add(documents)
    before = len(base.documents())
    assert before < 5
    base.ask(GLORRIC)
    base.ask("What did the guest order?")
    (documents / "tides.txt").write_text("High water comes at noon. Low water follows after six hours.")
    base.add(documents)
    kept = base.ask(GLORRIC)
    assert kept.plan.cache_hit.question == GLORRIC
    (documents / "news.txt").write_text("The password of Glorric is needle.")
    base.add(documents)
    renewed = base.ask(GLORRIC)
    assert renewed.plan.cache_hit is None
    questions = [question for question, _ in base.answers.most_used()]
    questions += [one.question for one in base.answers.pending()]
    assert sorted(questions) == sorted({GLORRIC, "What did the guest order?"})
