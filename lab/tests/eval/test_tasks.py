"""Every task through the same checks: samples repeat, fit, and their answers are right."""

import random
import re
from functools import cache

import pytest

from kvweave.errors import InvalidRequest
from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.samples import SampleSpec, generate
from kvweave_lab.eval.tasks import EVERY_TASK as TASKS
from kvweave_lab.eval.tasks import METRIC_OF
from kvweave_lab.eval.world import DEV, SPLITS, TEST, TRAIN, Haystack, World
from lab_support.pools import TASK_MODULES
from lab_support.solver import SOLVERS

CHUNK = 96
EVERY_TASK = pytest.mark.parametrize("task", TASKS)
EVERY_SPLIT = pytest.mark.parametrize("split", SPLITS)


@cache
def count(text: str) -> int:
    """About as many tokens as a common tokenizer makes: digits and signs alone, words in pieces."""
    return len(re.findall(r"\d|[^\W\d]{1,5}|[^\w\s]", text))


@cache
def haystack(split: str) -> Haystack:
    return Haystack.of_split(TEST if split == TRAIN else split)  # training's is not part of the package


@cache
def samples(
    task: str, split: str, *, seed: int = 0, tokens: int = 512, chunk: int = CHUNK, of: int | None = None
):
    of = of or (
        3 if tokens < 2048 else 1
    )  # one long sample has as many chunks and sentences as many short ones
    return tuple(generate(task, SampleSpec(split, seed, tokens, chunk), of, count, haystack(split)))


def test_every_task_module_is_listed():
    listed = {task.name for module in TASK_MODULES for task in module.TASKS}
    assert listed == set(TASKS) == set(METRIC_OF) == set(SOLVERS)


@EVERY_TASK
@EVERY_SPLIT
class TestEveryTask:
    def test_samples_repeat_and_more_keep_the_earlier_ones(self, task, split):
        few, many = samples(task, split, of=2), samples(task, split)
        assert few == many[:2]
        assert len({sample.name for sample in many}) == len({sample.chunks for sample in many}) == 3

    def test_another_seed_gives_other_samples(self, task, split):
        one, other = (samples(task, split, seed=seed) for seed in (0, 1))
        assert not {sample.chunks for sample in one} & {sample.chunks for sample in other}
        assert not {sample.name for sample in one} & {sample.name for sample in other}

    def test_natural_text_has_no_names_and_values_of_the_documents(self, task, split):
        sample, *_ = samples(task, split)
        world = World(random.Random(sample.name.rpartition("-")[0]), split)
        TASKS[task](world)  # as for the sample
        telling = [f"Nobody believed in {word.upper()} any more." for word in world.drawn]
        silent = [f"In {year} it rained for days on end." for year in range(1700, 1800)]
        natural = Haystack([" ".join([*telling, *silent])])
        (again,) = generate(task, SampleSpec(split, 0, 512, CHUNK), 1, count, natural)
        assert again.question == sample.question
        assert "it rained for days" in " ".join(again.chunks)
        assert "Nobody believed in" not in " ".join(again.chunks)

    @pytest.mark.parametrize(
        ("tokens", "chunk"), [(512, 96), (512, 512), (2048, 64), (2048, 128), (8192, 512)]
    )
    def test_a_reader_finds_the_answer(self, task, split, tokens, chunk):
        for sample in samples(task, split, tokens=tokens, chunk=chunk):
            found = SOLVERS[task](sample, split)
            assert METRICS[sample.metric](", ".join(found), sample.answers) == 1
            context = " ".join(sample.chunks)
            assert all(re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", context) for answer in found)

    def test_a_part_of_a_word_scores_nothing(self, task, split):
        for sample in samples(task, split):
            assert METRICS[sample.metric](", ".join(sample.answers)[:-1], sample.answers) < 1
            assert (
                METRICS[sample.metric](", ".join(answer[:-1] for answer in sample.answers), sample.answers)
                == 0
            )

    def test_the_allowed_length_is_enough_for_the_answer(self, task, split):
        assert all(
            sample.max_new_tokens >= count(", ".join(sample.answers)) for sample in samples(task, split)
        )


# Every length with every chunk size; splits take turns, since sizes do not depend on them.
LENGTHS = [(tokens, chunk) for tokens in (512, 2048, 8192) for chunk in (64, 96, 128, 512)]


@EVERY_TASK
@pytest.mark.parametrize(
    ("split", "tokens", "chunk"),
    [(SPLITS[(turn + turn // 4) % 4], *lengths) for turn, lengths in enumerate(LENGTHS)],
)
def test_chunks_keep_to_their_size_and_add_up_to_the_context(task, split, tokens, chunk):
    for sample in samples(task, split, tokens=tokens, chunk=chunk):
        sizes = [count(text) for text in sample.chunks]
        assert 0 < min(sizes) <= max(sizes) <= chunk
        assert 0.93 * tokens <= sum(sizes) <= 1.01 * tokens


@EVERY_TASK
def test_chunks_keep_to_their_size_under_another_tokenizer(task):
    tokenizer = tiny_tokenizer()

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for sample in generate(task, SampleSpec(DEV, 0, 2048, 512), 3, tokens, haystack(DEV)):
        assert max(map(tokens, sample.chunks)) <= 512


@EVERY_TASK
def test_a_too_short_context_is_refused_with_advice(task):
    with pytest.raises(InvalidRequest, match="take a longer context or chunks of another size"):
        samples(task, DEV, tokens=12, chunk=12)


def test_every_one_of_hundreds_of_samples_fits():
    # Chunks of 64 tokens: in some arrangements the pieces at a cut leave too little space for the others.
    assert len(samples("coref", TEST, chunk=64, of=150)) == 150


@pytest.mark.parametrize("task", ["twohop", "vartrack", "contradiction"])
def test_a_task_with_steps_wants_the_value_after_them(task):
    (sample,) = samples(task, TEST, of=1)
    (value,) = sample.answers
    score = METRICS[sample.metric]
    assert score(value, sample.answers) == score(f"Brenek, {value}", sample.answers) == 1
    assert score(f"{value}, kettle", sample.answers) == 0


def test_naming_both_things_is_no_answer_to_which_came_first():
    (sample,) = samples("order", TEST, of=1)
    first, second = re.findall(r"the (\w+)(?= or|\?)", sample.question)
    assert sorted(METRICS[sample.metric](said, sample.answers) for said in (first, second)) == [0, 1]
    assert METRICS[sample.metric](f"{first} {second}", sample.answers) == 0


class TestNames:
    def one(self, natural=None):
        (sample,) = generate("single", SampleSpec(DEV, 0, 512, CHUNK), 1, count, natural or haystack(DEV))
        return sample

    def test_a_name_has_the_origin_of_the_sample_and_ends_with_its_digest(self):
        source, _, digest = self.one().name.rpartition("-")
        assert source == f"single/dev/512/{CHUNK}/0/0"
        assert re.fullmatch("[0-9a-f]{8}", digest)

    def test_another_context_has_another_name_about_the_same_world(self):
        other = Haystack(["It rained. The dog barked at nobody at all. Then it was night."])
        one, another = self.one(), self.one(other)
        assert one.question == another.question
        assert one.name != another.name

    @pytest.mark.parametrize(
        ("target", "value"),
        [
            ("tasks.needles.ASKED", {DEV: ("Say the {a} of {k}!",)}),
            ("samples.METRIC_OF", {"single": "f1"}),
        ],
    )
    def test_another_question_or_metric_has_another_name(self, target, value, monkeypatch):
        before = self.one()
        monkeypatch.setattr(f"kvweave_lab.eval.{target}", value)
        assert self.one().name != before.name
