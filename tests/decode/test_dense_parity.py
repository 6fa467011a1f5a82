"""At a budget of 100 % decoding by retrieval is plain transformers decoding, for every family."""

import warnings
from dataclasses import replace

import pytest
import torch

from kvweave.decode.clusters.centroids import Centroids
from kvweave.decode.handoff import enter
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model

N, NEW = 90, 24
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 5e-4  # on logits of magnitude 5, float32, summed portion by portion
KV = OffloadSettings(
    kv_budget=1.0,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16),
    flash=DiskSettings(page_bytes=512),
)
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}


def plain(family: str):
    """Tokens and logits of transformers' own generate."""
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
    with enter(adapter, kv_cache, IDS, KV, question_tokens=16) as held:
        for token in tokens[:-1]:
            assert int(found[-1].argmax()) == token
            found.append(adapter.step(held, token))
        torch.testing.assert_close(torch.cat(found), logits, atol=TOLERANCE, rtol=TOLERANCE)
        if any(layer.sliding is None for layer in held.layers):
            assert held.counts.retrieved > 0


def test_centroids_are_being_read_when_a_layer_projects_its_query(monkeypatch):
    adapter = tiny_adapter("llama")
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    events: list[tuple[str, int]] = []
    for index, layer in enumerate(adapter.model.model.layers):
        layer.self_attn.q_proj.register_forward_pre_hook(
            lambda module, given, index=index: events.append(("project", index))
        )
    begin, attend = Centroids.begin, OffloadedCache.attend
    monkeypatch.setattr(
        Centroids, "begin", lambda self, index: (events.append(("begin", index)), begin(self, index))[1]
    )
    monkeypatch.setattr(
        OffloadedCache,
        "attend",
        lambda self, call, rows: (events.append(("attend", call.layer)), attend(self, call, rows))[1],
    )
    with enter(adapter, kv_cache, IDS, replace(KV, kv_budget=0.5), question_tokens=16) as held:
        events.clear()
        adapter.step(held, 5)
    for index in range(adapter.geometry.layers):
        own = [name for name, layer in events if layer == index]
        assert own[:3] == ["begin", "project", "attend"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3-sliding", "gpt-neox"])
def test_a_prompt_read_in_blocks_through_the_clusters_is_the_same(family):
    """Nothing is computed on a canvas: the text begins empty, and its KV never stands in memory as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
        tokens, logits = plain(family)
    from kvweave.decode.offloaded_cache import OffloadedCache

    with OffloadedCache(adapter.geometry, KV) as held:
        found = [adapter.extend(held, IDS, block_tokens=13)]
        for token in tokens[:-1]:
            found.append(adapter.step(held, token))
        torch.testing.assert_close(torch.cat(found), logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_transformers_own_generate_goes_on_from_it():
    adapter = tiny_adapter()
    tokens, _ = plain("llama")
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    kv_cache.hold(N - 1)
    with enter(adapter, kv_cache, IDS[:-1], KV) as held:
        got = adapter.model.generate(
            torch.tensor([IDS]),
            attention_mask=torch.ones(1, N, dtype=torch.long),
            past_key_values=held,
            **SETTINGS,
        )
    assert got[0, N:].tolist() == tokens


def test_layers_with_a_window_of_their_own_hold_no_more_than_it():
    adapter = tiny_adapter("mistral-sliding")
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    with enter(adapter, kv_cache, IDS, KV) as held:
        for token in range(5, 25):
            adapter.step(held, token)
        assert {layer.recent.held for layer in held.layers} == {15}  # of 16, one place for the next row
        assert held.counts.pages_read == 0
