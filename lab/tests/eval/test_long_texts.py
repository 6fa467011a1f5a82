"""Long texts: evidence comes long before its question, and a text depends on its arguments alone."""

import random
import re

import pytest

from kvweave.models.loading import reference_tokenizer
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.long_texts import LONG_TASKS, MIN_DISTANCE, LongText, long_text
from kvweave_lab.eval.world import DEV, TEST, Haystack, World, split_of

HAYSTACK = Haystack.of_split(DEV)


@pytest.fixture(scope="module", params=["reference", "tiny"])
def template(request) -> PromptTemplate:
    """Templates of a tokenizer that adds a space before every text, and of one that does not."""
    return PromptTemplate(reference_tokenizer() if request.param == "reference" else tiny_tokenizer())


def text_of(template, task, decode_tokens=900, seed=0) -> LongText:
    given = {"seed": seed, "number": 0, "prompt_tokens": 300, "decode_tokens": decode_tokens}
    return long_text(task, template, HAYSTACK, DEV, **given)


@pytest.mark.parametrize("task", LONG_TASKS)
class TestLongText:
    def test_has_the_requested_length_and_is_the_beginning_of_a_longer_one(self, template, task):
        short, long = text_of(template, task, 500), text_of(template, task, 900)
        assert (short.decode_tokens, long.decode_tokens) == (500, 900)
        assert short.prompt_tokens == long.prompt_tokens >= 250
        assert short.token_ids == long.token_ids[: len(short.token_ids)]
        assert short.replies == long.replies[: len(short.replies)]
        assert text_of(template, task, 500, seed=1).token_ids != short.token_ids

    def test_states_the_evidence_long_before_the_question(self, template, task):
        text = text_of(template, task)
        far = [reply for reply in text.replies if reply.is_far]
        assert len(far) >= 3
        for reply in far:
            value = template.decode(text.token_ids[reply.value_start : reply.end]).strip()
            before = template.decode(text.token_ids[: reply.start])
            recent = template.decode(text.token_ids[reply.start - MIN_DISTANCE : reply.start])
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


def test_steps_of_reasoning_use_earlier_steps():
    script = LONG_TASKS["reasoning"](World(random.Random(3), DEV))
    values = {}
    for turn in [next(script.turns) for _ in range(30)]:
        before, value = turn.reply.split(", ")
        assert before in turn.statements[0]
        if before in values:
            assert values[before] == value
        (name,) = set(re.findall(r"[A-Z][a-z]+", turn.lead[1:])) - {before}
        values[name] = value
    assert len(values) == 30
