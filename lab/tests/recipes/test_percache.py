"""PerCache's projection reuse: exact, with fewer rows projected, and with its own entries in the store."""

from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch

import kvweave
from kvweave.kvstore.keys import has_queries
from kvweave.models.hooks import UnrotatedQueries
from kvweave.testing import tiny_adapter
from recipes.contract import close, files, plain_logits

MODELS = ["llama", "qwen2", "qwen3"]  # plain, with biases, with norms after the projections


@pytest.fixture(scope="module", params=MODELS)
def adapter(request):
    adapter = tiny_adapter(request.param)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # biases start as zeros and norms as ones, which would hide their effect
        for name, parameter in adapter.model.named_parameters():
            if name.endswith("proj.bias") or "q_norm" in name or "k_norm" in name:
                parameter += torch.randn(parameter.shape, generator=generator)
    return adapter


@contextmanager
def projected(adapter):
    """Record the rows of each call of each projection, by layer and name."""
    rows, hooks = defaultdict(list), []
    for layer, block in enumerate(adapter.model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            module = getattr(block.self_attn, name)
            module.layer_and_name = layer, name

            def count(module, args, output):
                rows[module.layer_and_name].append(args[0].shape[1])

            hooks.append(module.register_forward_hook(count))
    yield rows
    for hook in hooks:
        hook.remove()


def test_a_cold_and_a_warm_path_give_full_attention(adapter, store, prompt):
    expected = plain_logits(adapter, prompt)
    cold = kvweave.prefill(adapter, store, prompt, recipe="percache")
    assert cold.plan.fresh_tokens == cold.plan.prompt_tokens
    close(cold.logits, expected)
    warm = kvweave.prefill(adapter, store, prompt, recipe="percache")
    assert warm.plan.fresh_tokens == adapter.template.render(prompt).spans[-1].tokens
    assert not warm.new_entries
    close(warm.logits, expected)


def test_a_path_that_continues_differently_gives_full_attention_and_is_stored(adapter, store, prompt):
    kvweave.prefill(adapter, store, prompt, recipe="percache")
    a, b, c, d = prompt.chunks
    swapped = kvweave.Prompt("Who came?", (a, b, d, c), system=prompt.system)
    result = kvweave.prefill(adapter, store, swapped, recipe="percache")
    origins = [span.origin for span in result.plan.spans]
    assert origins == ["exact", "exact", "exact", "fresh", "fresh", "fresh"]
    close(result.logits, plain_logits(adapter, swapped))
    assert len(result.new_entries) == 2  # computed after rows that were not projected
    again = kvweave.prefill(adapter, store, swapped, recipe="percache")
    assert [span.origin for span in again.plan.spans] == ["exact"] * 5 + ["fresh"]
    close(again.logits, plain_logits(adapter, swapped))


def test_stored_rows_run_through_all_layers_without_projections(adapter, store, prompt):
    tokens = adapter.template.render(prompt)
    question, last = tokens.spans[-1].tokens, adapter.geometry.layers - 1
    rows_run = []
    hooks = [
        block.mlp.register_forward_hook(lambda module, args, output: rows_run.append(args[0].shape[1]))
        for block in adapter.model.model.layers
    ]
    for expected in (tokens.tokens, question):
        rows_run.clear()
        with projected(adapter) as rows:
            kvweave.prefill(adapter, store, prompt, recipe="percache")
        assert len(rows) == 3 * adapter.geometry.layers
        for (layer, _), counts in rows.items():
            # The last layer is run up to its attention, and then for the last row alone.
            assert counts == ([expected, 1] if layer == last else [expected])
        assert rows_run == [tokens.tokens] * last + [1]
    for hook in hooks:
        hook.remove()


def test_stored_queries_are_those_of_full_attention(adapter, store, prompt):
    tokens = adapter.template.render(prompt)
    result = kvweave.prefill(adapter, store, prompt, recipe="percache")
    layers = range(adapter.geometry.layers)
    seen, plan = UnrotatedQueries(layers), adapter.rows(torch.arange(tokens.tokens))
    plan.hooks.append(seen)
    adapter.compute(adapter.new_cache(tokens.tokens), tokens.token_ids, plan)
    assert len(result.new_entries) == 5
    for entry, span in zip(result.new_entries, tokens.spans[:-1], strict=True):
        assert entry.provenance.kind == "observed-qkv"
        found = store.get(adapter.fingerprint, tokens.ids(span), entry.provenance)
        for layer in layers:
            close(found.layer_queries(layer), seen.of(layer)[0, :, span.start : span.end])


def test_entries_with_and_without_queries_are_separate(adapter, store, prompt):
    kvweave.prefill(adapter, store, prompt, recipe="prefix")
    before = files(store)
    first = kvweave.prefill(adapter, store, prompt, recipe="percache")
    assert first.plan.fresh_tokens == first.plan.prompt_tokens
    after = files(store)
    assert {name: after[name] for name in before} == before
    assert len(after) == 2 * len(before)
    for recipe, queries in (("prefix", False), ("percache", True)):
        result = kvweave.prefill(adapter, store, prompt, recipe=recipe)
        close(result.logits, plain_logits(adapter, prompt))
        for found in result.plan.spans[:-1]:
            assert found.origin == "exact"
        ids = adapter.template.render(prompt)
        for span in ids.spans[:-1]:
            provenance = next(
                each
                for each in store.versions(adapter.fingerprint, [ids.ids(span)])[0]
                if has_queries(each) == queries
            )
            kv = store.get(adapter.fingerprint, ids.ids(span), provenance)
            assert (kv.queries is not None) == queries
    assert files(store) == after


def test_damaged_queries_are_computed_again(adapter, prompt, tmp_path):
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prefill(adapter, store, prompt, recipe="percache")
    ids = torch.tensor(adapter.template.chunk_ids(prompt.chunks[1])).numpy().tobytes()
    (file,) = [each for each in tmp_path.glob("??/*.safetensors") if ids in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last layer's queries
    file.write_bytes(data)
    with kvweave.ChunkStore(tmp_path) as store:
        result = kvweave.prefill(adapter, store, prompt, recipe="percache")
        origins = [span.origin for span in result.plan.spans]
        assert origins == ["exact", "exact", "fresh", "exact", "exact", "fresh"]
        close(result.logits, plain_logits(adapter, prompt))
        assert store.stats().damaged == 1


def test_a_family_with_fused_projections_works_as_prefix(store, prompt):
    adapter = tiny_adapter("phi3")
    assert adapter.projections is None
    first = kvweave.prefill(adapter, store, prompt, recipe="percache")
    assert {entry.provenance.kind for entry in first.new_entries} == {"observed"}
    for recipe in ("percache", "prefix"):
        result = kvweave.prefill(adapter, store, prompt, recipe=recipe)
        close(result.logits, plain_logits(adapter, prompt))
        assert [span.origin for span in result.plan.spans] == ["exact"] * 5 + ["fresh"]


def test_a_low_priority_pass_gives_full_attention_too(adapter, store, prompt):
    class Quiet:
        flops = 0

        def stop_requested(self):
            return False

        def wait_for_requests(self):
            raise AssertionError("no request waits for the model")

        def record_flops(self, flops):
            self.flops += flops

    low = Quiet()
    with adapter.low_priority(low):
        for _ in range(2):
            result = kvweave.prefill(adapter, store, prompt, recipe="percache")
            close(result.logits, plain_logits(adapter, prompt))
    assert result.plan.exact_tokens > 0
    assert low.flops > 0
