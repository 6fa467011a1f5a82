"""Every recipe through the same checks, against plain full prefill."""

import pytest
import torch

import kvweave
from kvweave.config import GenerationConfig
from kvweave.kvstore.keys import digest_tokens
from kvweave.models import fused_cache
from kvweave.models.attention import GroupedPlan
from kvweave.models.fused_cache import PlacedSpan
from kvweave.ops.grouped_attention import ContextGroup
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.prepare import Isolated
from kvweave.recipes.recipe import run
from kvweave.testing import end_only_at
from support.contract import close, corpus_of, plain_logits, prepare


def best_version(recipe, store, request, number):
    """Return the first stored KV of the exact path and the preparation's candidates in this prompt."""
    provenances = [request.exact_provenance(number), *recipe.prepare.candidates(request, [number])[0]]
    ids = request.prompt.ids(request.prompt.spans[number])
    return next(
        kv for provenance in provenances if (kv := store.get(request.adapter.fingerprint, ids, provenance))
    )


@pytest.mark.parametrize("name", METHODS)
class TestEveryRecipe:
    def test_ratio_one_equals_full_attention(self, name, adapter, store, prompt):
        prepare(adapter, store, prompt, name)
        result = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=1.0)
        close(result.logits, plain_logits(adapter, prompt))
        assert result.logits.shape == (1, adapter.model.config.vocab_size)

    def test_speculative_decoding_changes_no_answer(self, name, adapter, store, prompt):
        prepare(adapter, store, prompt, name)
        end_only_at(adapter)
        plain, quoting = (
            kvweave.generate(
                kvweave.prefill(adapter, store, prompt, recipe=name),
                max_new_tokens=12,
                settings=GenerationConfig(prompt_lookup_tokens=most),
            )
            for most in (0, 31)
        )
        assert list(quoting.ids) == list(plain.ids)
        assert plain.accepted_draft_tokens == 0

    def test_a_cold_store_gives_full_attention(self, name, adapter, store, prompt):
        result = kvweave.prefill(adapter, store, prompt, recipe=name)
        close(result.logits, plain_logits(adapter, prompt))
        assert result.plan.fresh_tokens == result.plan.prompt_tokens

    def test_ratio_zero_runs_the_question_over_prepared_and_placed_kv(self, name, adapter, store, prompt):
        recipe = recipe_named(name)
        prepare(adapter, store, prompt, name)
        tokens = adapter.template.render(prompt)
        result = run(recipe, adapter, store, tokens, ratio=0.0)
        prefix = tokens.ids(tokens.spans[0])
        ctx = PrepareContext(adapter, store, prefix, corpus_of(adapter, prompt))
        spans, rows = [PlacedSpan(adapter.encode(prefix), 0, 0)], []
        for span in tokens.spans[1:-1]:
            if not recipe.prepare.provenances(adapter, prefix, span.tokens):
                rows.append(torch.arange(span.start, span.end))
                continue
            # After the prefix alone the first chunk's isolated KV is exact, and preferred.
            inexact = not recipe.prepare.provenances(adapter, prefix, span.tokens)[0].exact
            how = Isolated() if inexact and span.chunk == 0 else recipe.prepare
            kv = how.compute(ctx, tokens.ids(span)).kv
            if recipe.prepare.max_versions is not None:
                kv = best_version(recipe, store, result.request, span.chunk + 1)
            spans.append(PlacedSpan(kv, span.start, {"naive": 0, "ape": len(prefix)}.get(name, span.start)))
        question = tokens.spans[-1]
        rows.append(torch.arange(question.start, question.end))
        positions, plan = torch.arange(tokens.tokens), adapter.rows(torch.cat(rows))
        if name == "ape":
            chunks = tokens.spans[1:-1]
            for span in chunks:
                positions[span.start : span.end] = torch.arange(span.tokens) + len(prefix)
            longest = max(span.tokens for span in chunks)
            positions[question.start :] = torch.arange(question.tokens) + len(prefix) + longest
            plan = GroupedPlan(
                plan.rows, torch.float32, ContextGroup(chunks[0].start, chunks[-1].end, 0.9, 0.9)
            )
        expected = adapter.compute(adapter.new_cache(tokens.tokens, spans, positions), tokens.token_ids, plan)
        close(result.logits, expected)

    def test_the_plan_partitions_the_prompt(self, name, adapter, store, prompt):
        prepare(adapter, store, prompt, name, slice(2))
        for ratio in (None, 1.0):
            plan = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=ratio).plan
            parts = plan.exact_tokens + plan.reused_tokens + plan.recomputed_tokens + plan.fresh_tokens
            assert parts == plan.prompt_tokens
            assert [s.start for s in plan.spans[1:]] == [s.end for s in plan.spans[:-1]]
            assert all(s.reason for s in plan.spans)

    def test_generation_after_one_request_does_not_change_the_next(
        self, name, adapter, store, prompt, monkeypatch
    ):
        monkeypatch.setattr(fused_cache, "SPARE_TOKENS", 8)  # generated tokens outgrow it
        prepare(adapter, store, prompt, name)
        kvweave.prefill(adapter, store, prompt, recipe=name)
        first = kvweave.prefill(adapter, store, prompt, recipe=name)
        logits = first.logits.clone()
        adapter.model.generate(
            **first.generate_kwargs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(kvweave.prefill(adapter, store, prompt, recipe=name).logits, logits)

    def test_generate_continues_as_plain_transformers_at_ratio_one(self, name, adapter, store, prompt):
        prepare(adapter, store, prompt, name)
        result = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=1.0)
        settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        got = adapter.model.generate(**result.generate_kwargs, **settings)
        ids = torch.tensor([adapter.template.render(prompt).token_ids])
        assert torch.equal(got, adapter.model.generate(ids, attention_mask=torch.ones_like(ids), **settings))

    def test_prompts_without_chunks_or_system_work(self, name, adapter, store):
        for prompt in (
            kvweave.Prompt("Why?"),
            kvweave.Prompt("Why?", ("",), system=""),
            kvweave.Prompt("", ("the inn",)),
        ):
            result = kvweave.prefill(adapter, store, prompt, recipe=name)
            close(result.logits, plain_logits(adapter, prompt))


def test_prefix_reuse_equals_full_attention_and_survives_a_restart(adapter, prompt, tmp_path):
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prefill(adapter, store, prompt, recipe="prefix")
    with kvweave.ChunkStore(tmp_path) as store:
        result = kvweave.prefill(adapter, store, prompt, recipe="prefix")
    question = adapter.template.render(prompt).spans[-1]
    assert result.plan.fresh_tokens == question.tokens
    close(result.logits, plain_logits(adapter, prompt))


@pytest.mark.parametrize("name", ["reuse", "weave", "cacheblend"])
def test_a_prompt_that_matches_as_prefix_and_by_chunk_mixes_no_positions(name, adapter, store, prompt):
    a, b, c, d = prompt.chunks
    earlier = kvweave.Prompt(prompt.question, (a, b, d), system=prompt.system)
    kvweave.prefill(adapter, store, earlier, recipe="prefix")
    kvweave.prepare(adapter, store, [d, c], recipe=name, system=prompt.system)
    reused = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=0.0)
    origins = [span.origin for span in reused.plan.spans]
    assert origins == ["exact", "exact", "exact", "reused", "reused", "fresh"]
    everything = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=1.0)
    close(everything.logits, plain_logits(adapter, prompt))
    ids = torch.tensor([adapter.template.render(prompt).token_ids])
    plain = adapter.model(ids, use_cache=True).past_key_values
    length, exact = ids.shape[1], sum(span.tokens for span in reused.plan.spans[:3])
    for result, end in ((everything, length - 1), (reused, exact)):
        for got, right in zip(result.generate_kwargs["past_key_values"].layers, plain.layers, strict=True):
            close(got.keys[:, :, :end], right.keys[:, :, :end])
            close(got.values[:, :, :end], right.values[:, :, :end])


def test_prefix_matches_up_to_the_first_difference(adapter, store, prompt):
    kvweave.prefill(adapter, store, prompt, recipe="prefix")
    a, b, c, d = prompt.chunks
    swapped = kvweave.Prompt(prompt.question, (a, b, d, c), system=prompt.system)
    result = kvweave.prefill(adapter, store, swapped, recipe="prefix")
    assert [span.origin for span in result.plan.spans] == [
        "exact",
        "exact",
        "exact",
        "fresh",
        "fresh",
        "fresh",
    ]
    close(result.logits, plain_logits(adapter, swapped))


def test_rows_computed_after_stale_ones_are_not_stored(adapter, store, prompt):
    """Only exact KV may become a node, although the request computed the later chunks freshly."""
    kvweave.prepare(adapter, store, prompt.chunks[1:2], system=prompt.system)
    tokens = adapter.template.render(prompt)
    result = run(recipe_named("reuse"), adapter, store, tokens)
    assert [span.origin for span in result.plan.spans] == [
        "exact",
        "fresh",
        "reused",
        "fresh",
        "fresh",
        "fresh",
    ]
    assert [entry.content.token_ids for entry in result.new_entries] == [tokens.ids(tokens.spans[1])]
    everything = run(recipe_named("reuse"), adapter, store, tokens, ratio=1.0)
    assert len(everything.new_entries) == 3
    assert all(entry.provenance.exact for entry in everything.new_entries)


def test_new_kv_equals_full_attention(adapter, store, prompt):
    tokens = adapter.template.render(prompt)
    result = run(recipe_named("prefix"), adapter, store, tokens)
    whole = adapter.encode(tokens.token_ids)
    for entry, span in zip(result.new_entries, tokens.spans[:-1], strict=True):
        torch.testing.assert_close(
            entry.content.kv, whole.kv[:, :, :, span.start : span.end], atol=1e-4, rtol=1e-4
        )
        assert entry.sources == tuple(digest_tokens(tokens.ids(s)) for s in tokens.spans[1 : span.chunk + 2])


def test_the_first_chunk_of_reuse_is_exact(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, system=prompt.system)
    plan = kvweave.prefill(adapter, store, prompt).plan
    assert [span.origin for span in plan.spans] == ["exact", "exact", "reused", "reused", "reused", "fresh"]


def test_preparing_again_computes_nothing(adapter, store, prompt):
    assert kvweave.prepare(adapter, store, prompt.chunks) == 4
    assert kvweave.prepare(adapter, store, prompt.chunks) == 0


def test_kv_of_another_system_prompt_or_namespace_is_not_found(adapter, prompt, tmp_path):
    with kvweave.ChunkStore(tmp_path, namespace="a") as store:
        kvweave.prepare(adapter, store, prompt.chunks, system="Another.")
        assert (
            kvweave.prefill(adapter, store, prompt).plan.fresh_tokens
            == kvweave.prefill(adapter, store, prompt, recipe="full").plan.prompt_tokens
        )
    with kvweave.ChunkStore(tmp_path, namespace="b") as store:
        assert kvweave.prefill(adapter, store, prompt).plan.reused_share == 0
