"""Tasks whose placement is drawn: where sentences stand, which chunks are in the prompt, and what is prepared."""

import random
import re
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.documents import Apart, Together
from kvweave_lab.eval.layout import lay_out, names_people
from kvweave_lab.eval.samples import SampleSpec, generate
from kvweave_lab.eval.tasks import EVERY_TASK, METRIC_OF, PERMUTED, TASK_SETS, TASKS, task_set
from kvweave_lab.eval.tasks.mixed import DISTANCES
from kvweave_lab.eval.world import DEV, Haystack, World

HAY = tuple(f"Rain number {number} fell on the old hill." for number in range(60))  # 8 words each
MIXED = ("coref-mixed", "vartrack-mixed", "contradiction-mixed")


def words(text: str) -> int:
    return len(text.split())


def laid(*pieces, seed=0, haystack=HAY, context=360, chunk=60):
    return lay_out(random.Random(seed), pieces, context, chunk, words, haystack)


def holding(chunks, text):
    (at,) = (number for number, chunk in enumerate(chunks) if text in chunk.text)
    return at


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sentences", DISTANCES)
class TestApart:
    @pytest.mark.parametrize(
        ("back", "inserted", "places"), [(1, False, (0, 1)), (2, False, (0, 2)), (2, True, (0, 1))]
    )
    def test_sentences_are_as_far_apart_as_they_should_be(self, seed, sentences, back, inserted, places):
        pair = Apart("Ann came.", "She sat down.", sentences, back, inserted)
        chunks = laid(pair, Together(("Tom came.", "He stood.")), seed=seed)
        before, after = holding(chunks, pair.first), holding(chunks, pair.then)
        assert after - before == back
        assert chunks[before].text.endswith(pair.first)
        start = chunks[after].text.partition(pair.then)[0].strip()
        assert len(re.findall(r"\.", start)) == sentences
        documents = [chunks[number].document for number in (before, after)]
        assert [place for _, place in documents] == list(places)
        assert len({document for document, _ in documents}) == 1
        middle = chunks[before + 1 : after]
        assert all("Tom" not in chunk.text for chunk in middle)
        assert all((chunk.document[0] == documents[0][0]) is not inserted for chunk in middle)

    def test_a_name_that_is_not_retrieved_is_in_the_document_only(self, seed, sentences):
        pair = Apart("Ann came.", "She sat down.", sentences, missing="first")
        *prompt, last = laid(pair, Together(("Tom came.", "He stood.")), seed=seed)
        assert not last.retrieved
        assert last.text.endswith(pair.first)
        assert all(chunk.retrieved and pair.first not in chunk.text for chunk in prompt)
        at = holding(prompt, pair.then)
        assert prompt[at].document == (last.document[0], 1)
        assert last.document[1] == 0
        assert holding(prompt, "Tom came.") >= at  # "She" could be said of no one who is named before

    def test_a_later_sentence_that_is_not_retrieved_is_in_the_document_only(self, seed, sentences):
        pair = Apart("Ann is tall.", "That was wrong.", sentences, missing="then")
        *prompt, last = laid(pair, seed=seed)
        assert not last.retrieved
        assert pair.then in last.text
        at = holding(prompt, pair.first)
        assert last.document == (prompt[at].document[0], 1)


def test_no_natural_sentence_is_repeated_and_none_names_people():
    known = ("He left.", "We saw Ann there.", "I saw her.")
    for seed in range(10):
        chunks = laid(Apart("Ann came.", "She sat down.", 4), seed=seed, haystack=(*HAY, *known))
        text = " ".join(chunk.text for chunk in chunks)
        assert max(Counter(re.findall(r"number \d+", text)).values()) == 1
        assert not any(sentence in text for sentence in known)
    assert [*map(names_people, known)] == [True] * 3
    assert not any(map(names_people, (*HAY, "There I heard the rain.")))


@cache
def samples(task, of=120, tokens=512):
    count = lambda text: len(re.findall(r"\d|[^\W\d]{1,5}|[^\w\s]", text))  # noqa: E731
    return generate(task, SampleSpec(DEV, 0, tokens, 96), of, count, Haystack.of_split(DEV))


@pytest.mark.parametrize("task", MIXED)
class TestSamples:
    def test_every_placement_occurs(self, task):
        named = {sample.placement for sample in samples(task)}
        wheres = ("1 back", "2 back", "2 back, inserted", "not retrieved")
        assert {name.rpartition(",")[0] for name in named} == set(wheres)
        assert {int(name.rpartition(",")[2].split()[0]) for name in named} == set(DISTANCES)
        missing = sum(name.startswith("not") for name in (sample.placement for sample in samples(task)))
        assert 0.1 < missing / 120 < 0.4

    def test_documents_have_all_chunks_of_the_prompt_and_the_missing_one(self, task):
        for sample in samples(task):
            written = [text for document in sample.documents for text in document]
            assert len(set(written)) == len(written)
            extra = set(written) - set(sample.chunks)
            assert set(sample.chunks) < {*written, ""}
            assert len(extra) == sample.placement.startswith("not retrieved")

    def test_other_chunks_stand_between_those_of_a_document(self, task):
        orders = []
        for sample in samples(task):
            at = {text: number for number, text in enumerate(sample.chunks)}
            for document in sample.documents:
                places = [at[text] for text in document if text in at]
                assert places == sorted(places)  # the name is before what refers to it
                orders += [later - earlier for earlier, later in pairwise(places)]
        assert set(orders) == {1, 2}

    def test_a_question_has_its_answer_in_the_prompt(self, task):
        for sample in samples(task):
            assert all(answer in " ".join(sample.chunks) for answer in sample.answers)


@pytest.mark.parametrize("task", TASK_SETS["permuted"])
class TestPermutedSamples:
    def test_they_are_the_mixed_ones_with_their_chunks_in_another_order(self, task):
        moved = 0
        for sample, mixed in zip(samples(task), samples(PERMUTED[task]), strict=True):
            assert sorted(sample.chunks) == sorted(mixed.chunks)
            assert (sample.question, sample.answers, sample.metric) == (
                mixed.question,
                mixed.answers,
                mixed.metric,
            )
            assert sample.documents == mixed.documents  # chunks are prepared as they follow each other there
            assert sample.placement == f"{mixed.placement}, permuted"
            assert sample.name != mixed.name
            moved += sample.chunks != mixed.chunks
        assert moved > 110

    def test_the_sentence_asked_about_stands_before_the_one_it_refers_to(self, task):
        checked = 0
        for sample in samples(task):
            draft = EVERY_TASK[task](World(random.Random(sample.name.rpartition("-")[0]), DEV))
            pair = next(piece for piece in draft.pieces if isinstance(piece, Apart))
            if pair.missing is None:
                (first,) = (at for at, text in enumerate(sample.chunks) if pair.first in text)
                (then,) = (at for at, text in enumerate(sample.chunks) if pair.then in text)
                assert then < first
                checked += 1
        assert checked > 60


def test_the_fixed_tasks_are_unchanged_and_the_sets_are_known():
    assert not set(MIXED) & set(TASKS)  # the reference model's training draws from these
    assert task_set("fixed") == tuple(TASKS)
    assert task_set("neutral") == (*MIXED, "twohop", "order")
    permuted = ("coref-permuted", "vartrack-permuted", "contradiction-permuted")
    assert task_set("permuted") == permuted
    assert set(METRIC_OF) == set(EVERY_TASK) == {*TASKS, *MIXED, *permuted}
    assert list(TASK_SETS) == ["fixed", "neutral", "permuted"]
    with pytest.raises(
        InvalidRequest, match="no set of tasks 'other'; choose one of fixed, neutral, permuted"
    ):
        task_set("other")
