"""`fallback_margin`: from the first open token on, an answer is that of plain full prefill."""

from itertools import pairwise

import pytest
import torch

import kvweave
from kvweave.config import GenerationConfig
from kvweave.testing import end_only_at
from support.contract import prepare

COUNT = 10


def answer(adapter, store, prompt, margin, recipe="reuse", quotes=0):
    settings = GenerationConfig(prompt_lookup_tokens=quotes, fallback_margin=margin)
    result = kvweave.prefill(adapter, store, prompt, recipe=recipe)
    return kvweave.generate(result, max_new_tokens=COUNT, settings=settings)


def plain_steps(adapter, ids, count):
    """Return transformers' own greedy tokens after `ids`."""
    found = adapter.model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(ids) :].tolist()


def margins(adapter, store, prompt, reply):
    """Return how far the first token is ahead at each place of a reply, over reused KV."""
    result = kvweave.prefill(adapter, store, prompt, recipe="reuse")
    rows = torch.cat([result.logits, adapter.verify_draft(result.kv_cache, reply[:-1])])
    first, second = rows.topk(2).values.T
    return (first - second).tolist()


@pytest.fixture
def reused(adapter, store, prompt):
    """A prompt whose chunks have isolated KV, and the reply over it."""
    prepare(adapter, store, prompt, "reuse")
    end_only_at(adapter)
    return list(answer(adapter, store, prompt, 0.0).ids)


@pytest.mark.parametrize("quotes", [0, 31])
def test_the_rest_of_the_answer_is_full_attention_s_from_the_first_open_token_on(
    adapter, store, prompt, reused, quotes
):
    ids = list(adapter.template.render(prompt).token_ids)
    ahead = margins(adapter, store, prompt, reused)
    assert plain_steps(adapter, ids, COUNT) != reused
    ordered = sorted(ahead)
    for margin in ((one + other) / 2 for one, other in pairwise(ordered)):
        first = next(place for place, each in enumerate(ahead) if each < margin)
        found = answer(adapter, store, prompt, margin, quotes=quotes)
        before = reused[:first]
        assert list(found.ids) == [*before, *plain_steps(adapter, [*ids, *before], COUNT - first)]
        assert found.fallback_at == first


def test_a_margin_that_no_token_misses_changes_nothing(adapter, store, prompt, reused):
    found = answer(adapter, store, prompt, min(margins(adapter, store, prompt, reused)) / 2)
    assert (list(found.ids), found.fallback_at) == (reused, None)


def test_exact_kv_needs_no_fallback(adapter, store, prompt, reused):
    assert answer(adapter, store, prompt, 1e6, recipe="prefix").fallback_at is None
    assert answer(adapter, store, prompt, 1e6, recipe="full").fallback_at is None


def test_a_sampled_answer_has_none(adapter, store, prompt, reused):
    result = kvweave.prefill(adapter, store, prompt, recipe="reuse")
    settings = GenerationConfig(temperature=0.8, seed=1, fallback_margin=1e6)
    assert kvweave.generate(result, max_new_tokens=3, settings=settings).fallback_at is None
