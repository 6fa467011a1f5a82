"""Drafts of a reply: what comes out is what decoding token by token gives, with as few passes as the draft holds."""

import warnings

import pytest
import torch
from test_decoding import plainly, prompt

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.testing import FAMILIES, tiny_adapter

COUNT = 8


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
            adapter, canvas, ids, logits, settings or GenerationConfig(), most, decoded, drafts=drafts
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
        assert decoded.foretold == min(right, COUNT - 1), right
        checked = min(1, right)  # a draft that begins wrong is never run
        assert passes == COUNT - 1 - decoded.foretold + checked, right


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"], indirect=True)
def test_where_decoding_changes_frequencies_on_the_way_no_draft_is_taken(adapter, family):
    ids = prompt(60)  # of the 64 that the frequencies are for
    true = plainly(family, ids, COUNT)
    decoded, _ = drafted(adapter, ids, [true])
    assert (list(decoded.ids), decoded.foretold) == (true, 0)


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
