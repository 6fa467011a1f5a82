"""Long texts: what is asked was said long before, and a text depends on its arguments alone."""

import random
import re

import pytest

from kvweave.models.loading import reference_tokenizer
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.longtext import LONG_TASKS
from kvweave_lab.eval.longtext.telling import MIN_DISTANCE, LongText, long_text
from kvweave_lab.eval.splits import DEV, TEST, split_of
from kvweave_lab.eval.world import World

HAYSTACK = Haystack.of_split(DEV)


@pytest.fixture(scope="module", params=["reference", "tiny"])
def template(request) -> PromptTemplate:
    """A tokenizer that puts a space before every text, and one that does not."""
    return PromptTemplate(reference_tokenizer() if request.param == "reference" else tiny_tokenizer())


def text_of(template, task, decode_tokens=900, seed=0) -> LongText:
    given = {"seed": seed, "number": 0, "prompt_tokens": 300, "decode_tokens": decode_tokens}
    return long_text(task, template, HAYSTACK, DEV, **given)


@pytest.mark.parametrize("task", LONG_TASKS)
class TestALongText:
    def test_has_the_length_asked_for_and_is_the_beginning_of_a_longer_one(self, template, task):
        short, long = text_of(template, task, 500), text_of(template, task, 900)
        assert (short.decode_tokens, long.decode_tokens) == (500, 900)
        assert short.prompt_tokens == long.prompt_tokens >= 250
        assert short.token_ids == long.token_ids[: len(short.token_ids)]
        assert short.replies == long.replies[: len(short.replies)]
        assert text_of(template, task, 500, seed=1).token_ids != short.token_ids

    def test_says_what_it_asks_for_long_before(self, template, task):
        text = text_of(template, task)
        far = [reply for reply in text.replies if reply.far]
        assert len(far) >= 3
        for reply in far:
            value = template.text(text.token_ids[reply.judged : reply.end]).strip()
            before = template.text(text.token_ids[: reply.start])
            recent = template.text(text.token_ids[reply.start - MIN_DISTANCE : reply.start])
            word = re.compile(rf"\b{re.escape(value)}\b")
            assert word.search(before)
            assert not word.search(recent)

    def test_takes_its_names_from_its_split(self, task, template):
        world = World(random.Random(1), TEST)
        script = LONG_TASKS[task](world)
        for _ in range(40):
            next(script.turns)
        assert len(world.drawn) > 40
        assert {split_of(value) for value in world.drawn} == {TEST}


def test_a_chain_of_reasoning_builds_on_steps_before_it():
    script = LONG_TASKS["reasoning"](World(random.Random(3), DEV))
    holds = {}
    for turn in [next(script.turns) for _ in range(30)]:
        before, value = turn.reply.split(", ")
        assert before in turn.told[0]
        if before in holds:
            assert holds[before] == value
        (name,) = set(re.findall(r"[A-Z][a-z]+", turn.lead[1:])) - {before}
        holds[name] = value
    assert len(holds) == 30
