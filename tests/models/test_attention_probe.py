"""AttentionProbe against the eager attention of plain transformers."""

import warnings

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.ops import attention as logits
from kvweave.testing import tiny_adapter, tiny_model
from support.oracle import partial_prefill

N = 60
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
ROWS = torch.tensor([3, 20, 41, 58, 59])
# Grouped heads; a window in some layers or in all; soft-capped logits; custom query scaling; partial rotary.
EXACT_ON = ("llama", "qwen2-sliding", "mistral-sliding", "gemma2", "gemma3", "phi3-partial", "granite")


def eager(family: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


def probed(adapter, rows: torch.Tensor, *probes: AttentionProbe, spans=()) -> torch.Tensor:
    kv_cache = adapter.new_cache(N, spans)
    plan = adapter.rows(rows)
    plan.hooks.extend(probes)
    return adapter.compute(kv_cache, IDS, plan)


@pytest.fixture(scope="module", params=EXACT_ON)
def pair(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_adapter(request.param), eager(request.param)


@pytest.fixture(scope="module")
def true_weights(pair):
    """Eager attention of a full prefill, (L, H, N, N)."""
    with torch.no_grad():
        out = pair[1](torch.tensor([IDS]), output_attentions=True, use_cache=False)
    return torch.cat(out.attentions)


def test_weights_equal_eager_attention_averaged_over_heads_and_rows(pair, true_weights):
    probe = AttentionProbe(ROWS)
    probed(pair[0], torch.arange(N), probe)
    torch.testing.assert_close(probe.weights, true_weights[:, :, ROWS].mean(dim=(1, 2)), atol=1e-5, rtol=1e-4)


def test_columns_are_normalised_among_themselves_before_averaging(pair, true_weights):
    probe = AttentionProbe(ROWS, columns=(10, 40))
    probed(pair[0], torch.arange(N), probe)
    part = true_weights[:, :, ROWS, 10:40]
    mass = part.sum(dim=-1, keepdim=True)
    expected = torch.where(mass > 0, part / mass.clamp_min(1e-30), 0.0).mean(dim=(1, 2))
    torch.testing.assert_close(probe.weights, expected, atol=1e-5, rtol=1e-4)


def test_a_pass_over_stored_kv_equals_eager_attention_over_the_same_keys():
    adapter, plain = tiny_adapter("qwen3"), eager("qwen3")
    spans = [PlacedSpan(adapter.encode(IDS[start : start + 25]), start, start) for start in (0, 25)]
    rows = torch.arange(50, N)
    probe = AttentionProbe(ROWS[3:])
    kv_cache = adapter.new_cache(N, spans)
    plan = adapter.rows(rows)
    plan.hooks.append(probe)
    adapter.compute(kv_cache, IDS, plan)

    held = [(layer.keys[:, :, :N], layer.values[:, :, :N]) for layer in kv_cache.layers]
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[1]))
        for layer in plain.model.layers
    ]
    partial_prefill(plain, IDS, rows, held)
    for hook in hooks:
        hook.remove()
    expected = torch.cat(seen)[:, :, ROWS[3:] - 50].mean(dim=(1, 2))
    torch.testing.assert_close(probe.weights, expected, atol=1e-5, rtol=1e-4)


def test_recording_changes_no_bit_of_the_pass():
    adapter = tiny_adapter("gemma2")
    assert torch.equal(
        probed(adapter, torch.arange(N)), probed(adapter, torch.arange(N), AttentionProbe(ROWS))
    )


def test_only_the_chosen_layers_are_recorded():
    adapter = tiny_adapter()
    every, last = AttentionProbe(ROWS), AttentionProbe(ROWS, layers={2})
    probed(adapter, torch.arange(N), every, last)
    assert every.weights.shape == (3, N)
    assert torch.equal(last.weights, every.weights[2:])


def test_many_rows_run_in_blocks_with_the_same_result(monkeypatch):
    adapter = tiny_adapter()
    whole = AttentionProbe(torch.arange(N))
    probed(adapter, torch.arange(N), whole)
    monkeypatch.setattr(logits, "MAX_LOGITS", 7 * 4 * N)
    blocks = AttentionProbe(torch.arange(N))
    probed(adapter, torch.arange(N), blocks)
    torch.testing.assert_close(blocks.weights, whole.weights)


def test_a_row_that_the_pass_does_not_compute_is_refused():
    adapter = tiny_adapter()
    spans = [PlacedSpan(adapter.encode(IDS[:50]), 0, 0)]
    with pytest.raises(InvalidRequest, match=r"rows \[3, 20, 41\]"):
        probed(adapter, torch.arange(50, N), AttentionProbe(ROWS), spans=spans)


def test_bfloat16_stays_within_its_rounding_error():
    exact, coarse = AttentionProbe(ROWS), AttentionProbe(ROWS)
    probed(tiny_adapter("qwen2"), torch.arange(N), exact)
    probed(tiny_adapter("qwen2", dtype=torch.bfloat16), torch.arange(N), coarse)
    assert coarse.weights.dtype == torch.float32
    assert (coarse.weights - exact.weights).abs().max() < 0.05
