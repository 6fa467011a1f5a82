"""Chunks at overlapping positions with grouped attention (APE), against the definition written out."""

from functools import partial

import pytest
import torch
from transformers import AttentionInterface

from kvweave.errors import InvalidRequest
from kvweave.models.attention import GroupedPlan
from kvweave.ops.grouped_attention import ContextGroup
from kvweave.testing import FAMILIES
from kvweave.types import TokenizedPrompt
from support.oracle import partial_prefill, stock
from support.prompts import (
    APE_IDS,
    APE_N,
    APE_ROWS,
    CONTEXT,
    IDS,
    N,
    ape_kv_cache,
    ape_plan,
    ape_positions,
    computed_ape_kv_cache,
    held,
    quiet_adapter,
    stale_kv_cache,
)

TOLERANCE = 2e-4  # as in the parity tests
TEMPERATURE, SCALE = 0.8, 0.7
GROUP = ContextGroup(20, 40, 0.9, 0.9)
PROMPT = TokenizedPrompt(tuple(APE_IDS), (), (0, 0))


def written_out(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """Grouped attention as a model calls it, with a 4D mask and a separate softmax for every group."""
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(attention_mask < 0, float("-inf"))
    inside = torch.zeros(key.shape[2], dtype=torch.bool)
    inside[slice(*CONTEXT)] = True
    context, others = logits[..., inside] / TEMPERATURE, logits[..., ~inside]
    mass = torch.stack([context.logsumexp(-1) * SCALE * TEMPERATURE, others.logsumexp(-1)])
    share = mass.softmax(0)[..., None]
    out = share[0] * (context.softmax(-1).nan_to_num(0) @ value[:, :, inside])
    out = out + share[1] * (others.softmax(-1) @ value[:, :, ~inside])
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_question_attends_as_defined(family):
    adapter = quiet_adapter(family)
    kv_cache = ape_kv_cache(adapter)
    plan = ape_plan(adapter, APE_ROWS, temperature=TEMPERATURE, scale=SCALE)
    got = adapter.compute(kv_cache, APE_IDS, plan)
    before = held(kv_cache, APE_N)
    adapter.rotation.reset_lengths()
    AttentionInterface.register("written-out", written_out)
    adapter.model.set_attn_implementation("written-out")
    expected = partial_prefill(adapter.model, APE_IDS, APE_ROWS, before, rotary=ape_positions())
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_overlapping_positions_without_a_group_equal_plain_transformers_at_those_positions(family):
    adapter = quiet_adapter(family)
    kv_cache = ape_kv_cache(adapter)
    got = adapter.compute(kv_cache, APE_IDS, adapter.rows(APE_ROWS))
    adapter.rotation.reset_lengths()
    before = held(kv_cache, APE_N)
    expected = partial_prefill(stock(adapter.model), APE_IDS, APE_ROWS, before, rotary=ape_positions())
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_group_without_temperature_and_scale_makes_no_difference(adapter):
    rows = torch.arange(30, N)
    plan = GroupedPlan(rows, adapter.geometry.dtype, ContextGroup(20, 40, 1, 1))
    got = adapter.compute(stale_kv_cache(adapter), IDS, plan)
    expected = adapter.compute(stale_kv_cache(adapter), IDS, adapter.rows(rows))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_equals_computing_the_longer_prompt(adapter):
    kv_cache, _ = computed_ape_kv_cache(adapter)
    got = [adapter.step(kv_cache, token) for token in (11, 12)]
    for number, logits in enumerate(got, 1):
        longer = ape_kv_cache(adapter, APE_N + number)
        plan = ape_plan(adapter, torch.arange(CONTEXT[1], APE_N + number))
        expected = adapter.compute(longer, [*APE_IDS, 11, 12][: APE_N + number], plan)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def stepped(adapter, kv_cache, logits, count):
    chosen = []
    for _ in range(count):
        chosen.append(int(logits.argmax()))
        logits = adapter.step(kv_cache, chosen[-1])
    return chosen


def generated(adapter, kv_cache, prompt=PROMPT, count=8, **options):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    out = adapter.model.generate(
        **adapter.generate_kwargs(kv_cache, prompt), max_new_tokens=count, **settings
    )
    return out[0, prompt.tokens :].tolist()


def test_generate_continues_as_steps_do(adapter):
    kv_cache, logits = computed_ape_kv_cache(adapter)
    expected = stepped(adapter, kv_cache, logits, 8)
    assert generated(adapter, computed_ape_kv_cache(adapter)[0]) == expected


def test_generate_continues_at_overlapping_positions(adapter):
    kv_caches = [ape_kv_cache(adapter), ape_kv_cache(adapter)]
    logits = [adapter.compute(kv_cache, APE_IDS, adapter.rows(APE_ROWS)) for kv_cache in kv_caches]
    assert generated(adapter, kv_caches[1]) == stepped(adapter, kv_caches[0], logits[0], 8)


def test_beams_continue_in_groups_too():
    """The best of one beam search equals the best of all two-token continuations, each stepped on its own."""
    adapter = quiet_adapter("qwen2")
    vocabulary = adapter.model.config.vocab_size
    best = generated(adapter, computed_ape_kv_cache(adapter)[0], count=2, num_beams=vocabulary)
    kv_cache, logits = computed_ape_kv_cache(adapter)
    first = logits.log_softmax(-1)[0]
    scores = []
    for token in first.topk(40).indices.tolist():  # the other tokens cannot win: checked below
        after = adapter.step(kv_cache, token).log_softmax(-1)[0]
        kv_cache.truncate_prompt(APE_N)
        scores.append((float(first[token] + after.max()), [token, int(after.argmax())]))
    assert max(scores)[0] > float(first.sort(descending=True).values[40])
    assert max(scores)[1] == best


def test_rows_of_the_context_attend_causally():
    adapter = quiet_adapter("gemma2")
    rows = torch.arange(N)
    grouped, plain = adapter.new_cache(N), adapter.new_cache(N)
    plan = GroupedPlan(rows, adapter.geometry.dtype, GROUP)
    logits = adapter.compute(grouped, IDS, plan)
    adapter.compute(plain, IDS, adapter.rows(rows))
    for one, other in zip(held(grouped, 40), held(plain, 40), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    again = GroupedPlan(rows[40:], adapter.geometry.dtype, GROUP)
    torch.testing.assert_close(adapter.compute(plain, IDS, again), logits, atol=1e-4, rtol=1e-4)


def test_positions_that_the_answer_cannot_follow_are_refused():
    adapter = quiet_adapter("llama")
    with pytest.raises(InvalidRequest, match=r"shape \(3,\) for a prompt of 4"):
        adapter.new_cache(4, positions=torch.arange(3))
    with pytest.raises(InvalidRequest, match="rotary position 1, before 2"):
        adapter.new_cache(3, positions=torch.tensor([0, 2, 1]))


def outgrowing(adapter):
    """Return a cache 3 positions short of the 64 that the short frequencies are trained to."""
    ids = [*IDS, 5]
    kv_cache = adapter.new_cache(61)
    kv_cache.continuation = partial(GroupedPlan, dtype=adapter.geometry.dtype, group=GROUP)
    plan = GroupedPlan(torch.arange(61), adapter.geometry.dtype, GROUP)
    return kv_cache, adapter.compute(kv_cache, ids, plan), TokenizedPrompt(tuple(ids), (), (0, 0))


def test_outgrowing_the_short_frequencies_is_refused_if_the_cache_cannot_be_computed_again():
    adapter = quiet_adapter("phi3-longrope")
    kv_cache, logits, _ = outgrowing(adapter)
    expected = stepped(adapter, kv_cache, logits, 3)
    with pytest.raises(InvalidRequest, match="at position 64 the model needs its long RoPE frequencies"):
        adapter.step(kv_cache, 7)
    with pytest.raises(InvalidRequest, match="position 64"):
        adapter.step_packed([(kv_cache, 7)])
    kv_cache, _, prompt = outgrowing(adapter)
    assert generated(adapter, kv_cache, prompt, 3) == expected
    kv_cache, _, prompt = outgrowing(adapter)
    with pytest.raises(InvalidRequest, match="position 64"):
        generated(adapter, kv_cache, prompt, 8)
