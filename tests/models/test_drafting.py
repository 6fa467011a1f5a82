"""Drafts of a reply, and what the prompt tells of it: what comes out is what decoding token by token gives, in fewer passes."""

import warnings

import pytest
import torch
from test_decoding import plainly, prompt

from kvweave.config import GenerationConfig
from kvweave.engine.drafting import Foretelling
from kvweave.engine.generation import Decoded, generate
from kvweave.testing import FAMILIES, tiny_adapter

COUNT = 8
DRAFTS_ALONE = GenerationConfig(prompt_lookup_tokens=0)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def adapter(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
    adapter.model.generation_config.eos_token_id = []
    return adapter


def drafted(adapter, ids, drafts, settings=None, most=COUNT):
    """The reply, and how many calls of the model there were behind the prompt's."""
    canvas = adapter.canvas(len(ids))
    logits = adapter.compute(canvas, ids, adapter.rows(torch.arange(len(ids))))
    decoded, passes = Decoded(), []
    handle = adapter.model.register_forward_pre_hook(lambda *given: passes.append(1))
    try:
        for _ in generate(
            adapter, canvas, ids, logits, settings or DRAFTS_ALONE, most, decoded, drafts=drafts
        ):
            pass
    finally:
        handle.remove()
    return decoded, len(passes)


def other(token):
    return token + 1 if token < 200 else token - 1


def test_whatever_the_draft_the_reply_is_the_same(adapter, family):
    ids = prompt(40)
    true = plainly(family, ids, COUNT)
    for right in range(COUNT + 1):  # so many tokens of the draft are right
        draft = [*true[:right], *(other(token) for token in true[right:])]
        decoded, passes = drafted(adapter, ids, [draft])
        assert list(decoded.ids) == true, right
        # The first token is decoded before any draft is run, and the last one is not fed back.
        assert decoded.foretold == max(0, min(right, COUNT - 1) - 1), right
        assert passes == COUNT - 1 - decoded.foretold, right


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"], indirect=True)
def test_where_decoding_changes_frequencies_on_the_way_no_draft_is_run_across(adapter, family):
    ids = prompt(60)  # of the 64 that the frequencies are for
    true = plainly(family, ids, COUNT)
    decoded, _ = drafted(adapter, ids, [true])
    assert list(decoded.ids) == true
    assert decoded.foretold <= COUNT - 1 - (64 - 60 + 1)  # behind the change at most


def test_the_draft_that_begins_as_the_reply_does_is_checked():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(30)
    true = plainly("llama", ids, COUNT)
    wrong = [other(true[0]), *true[1:]]
    decoded, passes = drafted(adapter, ids, [wrong, true])
    assert (list(decoded.ids), passes) == (true, 1)


@pytest.mark.parametrize("end", [1, 3])
def test_a_reply_that_ends_within_the_draft_or_goes_on_behind_it(end):
    adapter = tiny_adapter()
    ids = prompt(40)
    adapter.model.generation_config.eos_token_id = []
    true = plainly("llama", ids, COUNT)
    longer, _ = drafted(adapter, ids, [true[:end]])
    assert list(longer.ids) == true
    adapter.model.generation_config.eos_token_id = [true[end]]
    shorter, passes = drafted(adapter, ids, [true])
    assert list(shorter.ids) == true[: true.index(true[end])]
    assert passes == 1


def test_only_greedy_decoding_takes_a_draft():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(40)
    true = plainly("llama", ids, COUNT)
    sampled = GenerationConfig(temperature=1.0, seed=3)
    plain, _ = drafted(adapter, ids, [], sampled)
    decoded, passes = drafted(adapter, ids, [true], sampled)
    assert (decoded.ids, decoded.foretold, passes) == (plain.ids, 0, COUNT - 1)


def test_a_draft_is_cut_to_the_room_there_is():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(40)
    true = plainly("llama", ids, COUNT)
    decoded, passes = drafted(adapter, ids, [true], most=3)
    assert (list(decoded.ids), passes) == (true[:3], 1)
    decoded, passes = drafted(adapter, ids, [true], most=1)
    assert (list(decoded.ids), passes) == (true[:1], 0)


def test_what_the_prompt_tells_changes_no_reply(adapter, family):
    for seed in range(4):
        ids = prompt(40, seed)
        true = plainly(family, ids, COUNT)
        ids = [
            *ids[:5],
            *true,
            *ids[5 + COUNT :],
        ]  # now the model says something else, part of it perhaps from there
        true = plainly(family, ids, COUNT)
        decoded, passes = drafted(adapter, ids, [true[:3]], GenerationConfig())
        assert list(decoded.ids) == true
        assert passes == COUNT - 1 - decoded.foretold


def test_a_reply_that_repeats_itself_in_the_prompt_comes_in_few_passes():
    """A model that says one token for ever, and a prompt that holds many of it."""
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    token = plainly("llama", prompt(40), 1)[0]
    with torch.no_grad():
        adapter.model.lm_head.weight.zero_()  # every logit is the same, and the first token wins
    ids = [*prompt(20), *[0] * 20, token]
    decoded, passes = drafted(adapter, ids, [], GenerationConfig(), most=19)
    assert list(decoded.ids) == [0] * 19
    assert decoded.foretold + passes == 18
    assert passes <= 4


class TestForetelling:
    def test_the_prompt_tells_what_followed_where_it_agrees_longest(self):
        prompt_ids = [1, 2, 3, 4, 9, 2, 3, 5, 3, 6, *[0] * 20, 7]
        assert Foretelling(prompt_ids).next([2, 3])[:1] == [5]  # the last of two such places
        assert Foretelling(prompt_ids).next([1, 2, 3])[:1] == [4]
        assert Foretelling(prompt_ids).next([8, 3])[:1] == [6]
        assert Foretelling(prompt_ids).next([8]) == []
        assert Foretelling(prompt_ids).next([7]) == []  # nothing stands behind the last one

    def test_a_draft_comes_first_as_long_as_it_is_the_reply(self):
        telling = Foretelling([5, 6, 7], [(5, 8, 9), (5, 6, 1)])
        assert telling.next([5]) == [8, 9]
        assert telling.next([5, 6]) == [1]
        assert telling.next([5, 6, 2]) == []

    def test_a_draft_that_has_come_to_its_end_leaves_the_rest_to_the_prompt(self):
        assert Foretelling([5, 6, 7], [(5,)]).next([5]) == [6, 7]

    def test_the_more_stands_the_more_is_told(self):
        telling = Foretelling([1] * 100)
        first = len(telling.next([1]))
        telling.held(first, first)
        assert len(telling.next([1])) > first
        for _ in range(10):
            telling.held(5, 0)
        assert len(telling.next([1])) == 1
        for _ in range(10):
            telling.held(1, 1)
        assert first < len(telling.next([1])) == 31
        assert len(Foretelling([1] * 100, most_quoted=3).next([1])) == 3

    def test_nothing_is_told_from_nothing(self):
        assert Foretelling([]).next([3]) == Foretelling([3, 4], most_quoted=0).next([3]) == []
