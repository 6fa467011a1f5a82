"""Stale KV that moves as recomputed rows have moved, against plain full prefill."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

import kvweave
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Isolated
from kvweave.recipes.recipe import Recipe, SelectedRows, run
from kvweave.recipes.select import QuestionAttention, Select, TopScores
from kvweave.recipes.shift import ShiftedRows
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV
from support.contract import close, plain_logits, prepare


def recipe(prior=0.0):
    select = TopScores(QuestionAttention(), 0.25)
    return Recipe("shifting", select=select, recompute=ShiftedRows(prior=prior), ratio=0.4)


def moved_store(adapter, prompt, by_chunk):
    """Full attention's KV of each chunk, stored as if it were isolated KV, moved by a vector of its chunk, (L, 2, G, 1, D)."""
    exact = kvweave.prefill(adapter, MemoryStore(), prompt, recipe="prefix")
    store, tokens = MemoryStore(), adapter.template.render(prompt)
    prefix = tokens.ids(tokens.spans[0])
    kv = {tuple(each.content.token_ids): each.content for each in exact.new_entries}
    for number, span in enumerate(tokens.spans[1:-1]):
        ids = tokens.ids(span)
        (provenance,) = Isolated().provenances(adapter, prefix, len(ids))
        provenance = replace(provenance, exact=False)
        store.put(adapter.fingerprint, ChunkKV(ids, kv[ids].kv + by_chunk[number]), provenance, ())
    return store


@pytest.fixture
def shifts(adapter):
    """A vector for each of four chunks; nothing in the first layer, whose KV no other text moves."""
    shape = adapter.geometry
    drawn = torch.randn(
        4, shape.layers, 2, shape.kv_heads, 1, shape.head_width, generator=torch.Generator().manual_seed(0)
    )
    drawn[:, 0] = 0
    return drawn


@dataclass(frozen=True)
class Moved(Isolated):
    """Finds the stored KV as not exact, so that it is stale."""

    def provenances(self, adapter, prefix, chunk_tokens):
        (found,) = Isolated.provenances(self, adapter, prefix, chunk_tokens)
        return (replace(found, exact=False),)


@pytest.mark.parametrize("prior", [0.0, 10.0])
def test_kv_that_all_tokens_of_a_chunk_moved_alike_is_corrected_to_full_attention(
    adapter, prompt, shifts, prior
):
    """With a prior the mean over chunks must be right, so all chunks move alike."""
    moved = shifts if not prior else shifts[:1].expand_as(shifts)
    store, tokens = moved_store(adapter, prompt, moved), adapter.template.render(prompt)
    shifting = replace(recipe(prior), prepare=Moved())
    corrected = run(shifting, adapter, store, tokens)
    left = run(replace(shifting, recompute=SelectedRows()), adapter, store, tokens)
    assert corrected.plan.recomputed_tokens < corrected.plan.reused_tokens
    expected = plain_logits(adapter, prompt)
    close(corrected.logits, expected)
    assert (left.logits - expected).abs().max() > 0.01


def test_later_tokens_attend_to_corrected_kv(adapter, prompt, shifts):
    store, tokens = moved_store(adapter, prompt, shifts), adapter.template.render(prompt)
    result = run(replace(recipe(), prepare=Moved()), adapter, store, tokens)
    ids = [5, 6, 7]
    got = adapter.verify_draft(result.kv_cache, ids)
    with torch.no_grad():
        whole = adapter.model(torch.tensor([[*tokens.token_ids, *ids]]), use_cache=False).logits[0, -3:]
    close(got, whole)


def test_a_chunk_without_recomputed_rows_moves_as_all_chunks_do(adapter, prompt, shifts):
    """All chunks move alike here, so that the others show how the last one does."""

    @dataclass(frozen=True)
    class AllButTheLast(Select):
        selective, supports_coverage, extractors = True, False, ()

        def choose(self, state):
            last = [found.span for found in state.matched if found.origin == "reused"][-1]
            state.spaced[:] = [state.stale[state.stale < last.start][::2]]
            return state.spaced[0]

    store, tokens = (
        moved_store(adapter, prompt, shifts[:1].expand_as(shifts)),
        adapter.template.render(prompt),
    )
    result = run(replace(recipe(10.0), prepare=Moved(), select=AllButTheLast()), adapter, store, tokens)
    close(result.logits, plain_logits(adapter, prompt))


def test_the_stored_kv_does_not_change(adapter, prompt):
    store = MemoryStore()
    prepare(adapter, store, prompt, "weave-shifted")
    first = kvweave.prefill(adapter, store, prompt, recipe="weave-shifted", ratio=0.3).logits.clone()
    assert torch.equal(
        kvweave.prefill(adapter, store, prompt, recipe="weave-shifted", ratio=0.3).logits, first
    )


def test_a_server_gives_what_one_request_gives(prompt, shifts):
    alone, many = tiny_adapter(), tiny_adapter()
    batcher = many.serve_many()
    try:
        logits = []
        for adapter in (alone, many):
            store, tokens = moved_store(adapter, prompt, shifts), adapter.template.render(prompt)
            logits.append(run(replace(recipe(), prepare=Moved()), adapter, store, tokens).logits)
        close(*logits)
        close(logits[1], plain_logits(many, prompt))
    finally:
        batcher.close()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_is_shifted_where_nothing_or_everything_is_recomputed(adapter, store, prompt, ratio):
    prepare(adapter, store, prompt, "weave-shifted")
    plain = replace(recipe_named("weave-shifted"), recompute=SelectedRows())
    tokens = adapter.template.render(prompt)
    with_drift, without = (
        run(each, adapter, store, tokens, ratio=ratio) for each in (recipe_named("weave-shifted"), plain)
    )
    assert torch.equal(with_drift.logits, without.logits)


def test_a_quarter_of_the_budget_is_evenly_spaced(adapter, store, prompt):
    prepare(adapter, store, prompt, "weave-shifted")
    result = run(recipe_named("weave-shifted"), adapter, store, adapter.template.render(prompt), ratio=0.4)
    plain = run(recipe_named("weave"), adapter, store, adapter.template.render(prompt), ratio=0.4)
    assert result.selected.numel() == plain.selected.numel()
    spans = [span for span in result.plan.spans if span.origin == "reused"]
    stale = torch.cat([torch.arange(span.start, span.end) for span in spans])
    count = math.ceil(result.selected.numel() / 4)
    sample = stale[torch.arange(count) * len(stale) // count]
    assert torch.isin(sample, result.selected).all()
    ranked = result.selected[~torch.isin(result.selected, sample)]
    assert torch.isin(ranked, plain.selected).all()
