"""With a budget of 100 %, offloaded decoding equals plain transformers decoding, for every family."""

import warnings

import pytest
import torch

from kvweave.decode.handoff import offload
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model

N, NEW = 90, 8
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 5e-4  # on float32 logits of magnitude 5, summed by portions
KV = OffloadSettings(
    kv_budget=1.0,
    window=4,  # so that generated tokens leave it
    clusters=ClusterSettings(mean_entries=8, max_entries=16),
    disk=DiskSettings(page_bytes=512),
)
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}


def plain(family: str):
    """Return tokens and logits of transformers' own generate."""
    model = tiny_model(family)
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    given = torch.tensor([IDS])
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        output_logits=True,
        return_dict_in_generate=True,
        **SETTINGS,
    )
    return out.sequences[0, N:].tolist(), torch.cat(out.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_budget_equals_plain_decoding(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # configurations of tiny shapes draw notices from some families
        adapter = tiny_adapter(family)
        tokens, logits = plain(family)
    kv_cache = adapter.new_cache(N)
    found = [adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))]
    with offload(adapter, kv_cache, IDS, KV, question_tokens=16) as cache:
        for token in tokens[:-1]:
            assert int(found[-1].argmax()) == token
            found.append(adapter.step(cache, token))
        torch.testing.assert_close(torch.cat(found), logits, atol=TOLERANCE, rtol=TOLERANCE)
        if any(layer.sliding_window is None for layer in cache.layers):
            assert cache.counts.retrieved > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3-sliding", "gpt-neox"])
def test_a_prompt_appended_in_blocks_is_the_same(family):
    """The text starts empty without a fused cache, and its KV is never in memory as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
        tokens, logits = plain(family)
    with OffloadedCache(adapter.geometry, KV) as cache:
        found = [adapter.append(cache, IDS, block_tokens=13)]
        for token in tokens[:-1]:
            found.append(adapter.step(cache, token))
        torch.testing.assert_close(torch.cat(found), logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_transformers_own_generate_continues_from_it():
    adapter = tiny_adapter()
    tokens, _ = plain("llama")
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    kv_cache.truncate_prompt(N - 1)
    with offload(adapter, kv_cache, IDS[:-1], KV) as cache:
        got = adapter.model.generate(
            torch.tensor([IDS]),
            attention_mask=torch.ones(1, N, dtype=torch.long),
            past_key_values=cache,
            **SETTINGS,
        )
    assert got[0, N:].tolist() == tokens


def test_layers_with_a_sliding_window_hold_no_more_than_it():
    adapter = tiny_adapter("mistral-sliding")
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    with offload(adapter, kv_cache, IDS, KV) as cache:
        for token in range(5, 25):
            adapter.step(cache, token)
        assert {layer.recent.entries for layer in cache.layers} == {15}  # of 16: one is left for the next row
        assert cache.counts.pages_read == 0
