"""Every task through the same checks: samples repeat, fit, and their answers are right."""

import re
from functools import cache

import pytest
from pools import TASK_MODULES
from solver import SOLVERS, said

from kvweave.errors import InvalidRequest
from kvweave.evaluation.haystack import Haystack
from kvweave.evaluation.samples import Setting, generate
from kvweave.evaluation.splits import DEV, SPLITS, TEST, TRAIN
from kvweave.evaluation.tasks import TASKS, coref
from kvweave.testing import tiny_tokenizer

CHUNK = 96
EVERY_TASK = pytest.mark.parametrize("task", TASKS)
EVERY_SPLIT = pytest.mark.parametrize("split", SPLITS)


def count(text: str) -> int:
    """About as many tokens as a common tokenizer makes: digits and signs alone, words in pieces."""
    return len(re.findall(r"\d|[^\W\d]{1,5}|[^\w\s]", text))


@cache
def haystack(split: str) -> Haystack:
    return Haystack.of_split(TEST if split == TRAIN else split)  # training's is not part of the package


def samples(task: str, split: str, *, seed: int = 0, tokens: int = 512, chunk: int = CHUNK, of: int = 4):
    return list(generate(task, Setting(split, seed, tokens, chunk), of, count, haystack(split)))


def test_every_task_module_is_listed():
    assert {module.NAME for module in TASK_MODULES} == set(TASKS) == set(SOLVERS)


@EVERY_TASK
@EVERY_SPLIT
class TestEveryTask:
    def test_samples_repeat_and_more_keep_the_earlier_ones(self, task, split):
        few, many = samples(task, split, of=3), samples(task, split, of=5)
        assert few == many[:3]
        assert len({sample.name for sample in many}) == len({sample.chunks for sample in many}) == 5

    def test_another_seed_gives_other_samples(self, task, split):
        one, other = (samples(task, split, seed=seed) for seed in (0, 1))
        assert not {sample.chunks for sample in one} & {sample.chunks for sample in other}
        assert not {sample.name for sample in one} & {sample.name for sample in other}

    @pytest.mark.parametrize("tokens", [512, 2048, 8192])
    def test_chunks_keep_to_their_size_and_add_up_to_the_context(self, task, split, tokens):
        for sample in samples(task, split, tokens=tokens, of=2):
            sizes = [count(chunk) for chunk in sample.chunks]
            assert max(sizes) <= CHUNK
            assert 0.5 * tokens <= sum(sizes) <= 1.15 * tokens  # whole sentences leave chunks short

    @pytest.mark.parametrize(("tokens", "chunk"), [(512, 96), (2048, 64), (2048, 128), (8192, 512)])
    def test_the_answer_is_what_a_reader_finds(self, task, split, tokens, chunk):
        for sample in samples(task, split, tokens=tokens, chunk=chunk, of=6):
            assert SOLVERS[task](sample, split) == sample.answers
            context = " ".join(sample.chunks)
            assert all(
                re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", context) for answer in sample.answers
            )

    def test_the_allowed_length_is_enough_for_the_answer(self, task, split):
        assert all(
            sample.max_new_tokens >= count(", ".join(sample.answers)) for sample in samples(task, split)
        )


@EVERY_TASK
def test_chunks_keep_to_their_size_under_another_tokenizer(task):
    tokenizer = tiny_tokenizer()

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for sample in generate(task, Setting(DEV, 0, 2048, 512), 3, tokens, haystack(DEV)):
        assert max(map(tokens, sample.chunks)) <= 512


@EVERY_TASK
def test_a_context_without_room_is_refused_with_what_to_do(task):
    with pytest.raises(InvalidRequest, match="take a longer context or chunks of another size"):
        samples(task, DEV, tokens=12, chunk=12)


def test_one_sample_in_hundreds_finds_its_room_as_well():
    # Chunks of 64 tokens: a long haystack sentence at a cut leaves some arrangements without room for the rest.
    assert len(samples("coref", TEST, chunk=64, of=150)) == 150


def test_a_cut_reference_mostly_starts_its_chunk_and_sometimes_stands_a_sentence_behind():
    starts = []
    for sample in samples("coref", TEST, tokens=2048, of=40):
        referring = said(sample, TEST, guest=coref.GUEST.referring, town=coref.TOWN.referring)
        starts += [sentence.start for sentence in referring if sentence.filled["v"] == sample.answers[0]]
    assert len(starts) == 40
    assert 20 < starts.count(0) < 40
