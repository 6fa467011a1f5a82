"""Every family against plain transformers: the same numbers for any mix of computed and placed KV."""

import warnings

import pytest
import torch

from kvweave.errors import UnsupportedModel
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model, tiny_tokenizer
from kvweave.types import ChunkKV, TokenizedPrompt
from support.oracle import full_prefill, partial_prefill, stock
from support.refused_models import REFUSED, refused_model

TOLERANCE = 2e-4  # on logits of magnitude 5, float32, another order of summation
N = 100
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some families warn about tiny configurations
        return tiny_adapter(request.param), stock(tiny_model(request.param))


def garbage(kv: ChunkKV) -> ChunkKV:
    return ChunkKV(kv.token_ids, torch.randn(kv.kv.shape, generator=torch.Generator().manual_seed(7)) * 3)


def everything(adapter: Adapter, start: int = 0):
    return adapter.rows(torch.arange(start, N))


def test_recomputing_everything_over_garbage_equals_full_prefill(pair):
    adapter, plain = pair
    expected, _ = full_prefill(plain, IDS, adapter.rotation)
    kv_cache = adapter.new_cache(N, [PlacedSpan(garbage(adapter.encode(IDS[:60])), 0, 0)])
    got = adapter.compute(kv_cache, IDS, everything(adapter))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_exact_prefixes_give_the_logits_of_full_prefill(pair):
    adapter, plain = pair
    first = adapter.encode(IDS[:40])
    second = adapter.encode(IDS[40:70], first)
    if adapter.rope_regime(40) != adapter.rope_regime(N):
        first, second = captured_at_full_length(adapter)
    expected, _ = full_prefill(plain, IDS, adapter.rotation)
    kv_cache = adapter.new_cache(N, [PlacedSpan(first, 0, 0), PlacedSpan(second, 40, 40)])
    got = adapter.compute(kv_cache, IDS, everything(adapter, 70))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def captured_at_full_length(adapter: Adapter) -> tuple[ChunkKV, ChunkKV]:
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, everything(adapter), capture=True)
    return adapter.extract_chunk_kv(kv_cache, IDS, 0, 40), adapter.extract_chunk_kv(kv_cache, IDS, 40, 70)


def test_placed_keys_are_bit_identical_to_the_ones_the_model_cached(pair):
    adapter, _ = pair
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, everything(adapter), capture=True)
    whole = adapter.extract_chunk_kv(kv_cache, IDS, 0, 90)
    again = adapter.new_cache(N, [PlacedSpan(whole, 0, 0)])
    adapter.compute(again, IDS, everything(adapter, 90))
    for made, placed in zip(kv_cache.layers, again.layers, strict=True):
        assert torch.equal(made.keys[:, :, :90], placed.keys[:, :, :90])
        assert torch.equal(made.values[:, :, :90], placed.values[:, :, :90])


def test_keys_moved_far_are_rotated_as_by_the_model_itself(pair):
    """Bare KV placed at 60 has, at the first layer, the same keys as these tokens computed at 60."""
    adapter, _ = pair
    first = adapter.encode(IDS[:30])
    ids = [*IDS[:60], *IDS[:30], 5]
    moved = adapter.new_cache(91, [PlacedSpan(first, 60, 60)])
    adapter.compute(moved, ids, adapter.rows(torch.tensor([*range(60), 90])))
    computed = adapter.new_cache(91)
    adapter.compute(computed, ids, adapter.rows(torch.arange(91)))
    assert torch.equal(moved.layers[0].keys[:, :, 60:90], computed.layers[0].keys[:, :, 60:90])


def test_selected_rows_over_stale_kv_equal_stock_attention_with_a_mask(pair):
    adapter, plain = pair
    rows = torch.cat([torch.arange(0, 10), torch.arange(13, 60, 3), torch.arange(88, N)])
    spans = [
        PlacedSpan(garbage(adapter.encode(IDS[10:50])), 10, 10),
        PlacedSpan(adapter.encode(IDS[50:88]), 50, 50),
    ]
    kv_cache = adapter.new_cache(N, spans)
    got = adapter.compute(kv_cache, IDS, adapter.rows(rows))
    held = [(layer.keys[:, :, :N], layer.values[:, :, :N]) for layer in kv_cache.layers]
    adapter.rotation.reset_lengths()
    expected = partial_prefill(plain, IDS, rows, held)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_generate_continues_on_the_kv_cache(pair):
    adapter, plain = pair
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, everything(adapter))
    got = adapter.model.generate(
        **adapter.generate_kwargs(kv_cache, TokenizedPrompt(tuple(IDS), (), (0, 0))), **settings
    )
    adapter.rotation.reset_lengths()
    expected = plain.generate(
        torch.tensor([IDS]), attention_mask=torch.ones(1, N, dtype=torch.long), **settings
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_models_are_refused_with_the_reason(kind):
    with pytest.raises(UnsupportedModel, match=REFUSED[kind][1]):
        Adapter(refused_model(kind), tiny_tokenizer())


def test_a_batch_with_padding_is_masked_as_by_the_library():
    """Our registered name must not make transformers drop the masks that an ordinary padded batch needs."""
    ours, plain = tiny_adapter().model, stock(tiny_model())
    ids = torch.tensor([[0, 0, *IDS[:8]], IDS[10:20]])
    mask = (ids != 0).long()
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, attention_mask=mask).logits[:, -1], plain(ids, attention_mask=mask).logits[:, -1]
        )


def test_beam_search_works_on_a_kv_cache():
    adapter, plain = tiny_adapter(), stock(tiny_model())
    settings = {
        "max_new_tokens": 6,
        "num_beams": 3,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, everything(adapter))
    got = adapter.model.generate(
        **adapter.generate_kwargs(kv_cache, TokenizedPrompt(tuple(IDS), (), (0, 0))), **settings
    )
    expected = plain.generate(
        torch.tensor([IDS]), attention_mask=torch.ones(1, N, dtype=torch.long), **settings
    )
    assert torch.equal(got, expected)


def test_bfloat16_stays_within_its_rounding_error():
    adapter = tiny_adapter("qwen2", dtype=torch.bfloat16)
    expected, _ = full_prefill(stock(tiny_model("qwen2", dtype=torch.bfloat16)), IDS, adapter.rotation)
    kv_cache = adapter.new_cache(N, [PlacedSpan(adapter.encode(IDS[:40]), 0, 0)])
    got = adapter.compute(kv_cache, IDS, everything(adapter, 40))
    exact, _ = full_prefill(stock(tiny_model("qwen2").to(torch.float32)), IDS, adapter.rotation)
    assert (got.float() - exact).abs().max() <= 3 * (expected.float() - exact).abs().max() + 0.05
