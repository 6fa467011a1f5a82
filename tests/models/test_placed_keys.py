"""Placed spans: gaps between their positions, and keys that are read before a pass."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.fused_cache import PlacedSpan
from kvweave.types import ChunkKV
from support.prompts import IDS, N, quiet_adapter, stale_kv_cache


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "phi3-partial", "smollm3"])
def test_offsets_rotate_each_token_as_if_it_were_placed_alone(family):
    adapter = quiet_adapter(family)
    kv, chosen, start = adapter.encode(IDS[:20]), torch.tensor([0, 3, 4, 11, 19]), 7
    some = ChunkKV(tuple(IDS[i] for i in chosen), kv.kv[:, :, :, chosen])
    positions = torch.tensor([*(start + chosen), 40])
    together = adapter.new_cache(6, [PlacedSpan(some, 0, start, chosen)], positions)
    each = [ChunkKV((IDS[i],), kv.kv[:, :, :, i : i + 1]) for i in chosen]
    alone = adapter.new_cache(
        6, [PlacedSpan(one, n, start + int(chosen[n])) for n, one in enumerate(each)], positions
    )
    ids, row = [*some.token_ids, IDS[20]], torch.tensor([5])
    logits = [adapter.compute(kv_cache, ids, adapter.rows(row)) for kv_cache in (together, alone)]
    assert torch.equal(*logits)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(together.layers, alone.layers, strict=True))


@pytest.mark.parametrize("read", [[0], [2], [2, 0, 1]])
def test_reading_a_layers_keys_first_changes_no_bit_of_a_later_pass(read):
    adapter, rows = quiet_adapter("llama"), torch.arange(40, N)
    plain, kv_cache = stale_kv_cache(adapter), stale_kv_cache(adapter)
    like = adapter.encode(IDS[:1]).kv[0, 0][None]
    seen = {layer: kv_cache.layer_kv(layer, like)[0].clone() for layer in read}
    assert torch.equal(*(adapter.compute(each, IDS, adapter.rows(rows)) for each in (plain, kv_cache)))
    for layer, keys in seen.items():
        assert torch.equal(keys[:, :, :40], plain.layers[layer].keys[:, :, :40])
        assert not keys[:, :, 40:].any()
    assert torch.equal(kv_cache.layer_kv(1, like)[0], plain.layers[1].keys[:, :, :N])


FAMILIES = ["llama", "llama-dynamic", "phi3-partial", "phi3-longrope", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_the_order_of_spans_nor_the_rotation_block_changes_a_bit(family, monkeypatch):
    adapter = quiet_adapter(family)
    layers = range(adapter.geometry.layers)
    some, offsets = adapter.encode(IDS[3:15]), torch.tensor([0, 1, 5, *range(7, 16)])
    spans = [
        PlacedSpan(some, 3, 3, offsets),
        PlacedSpan(adapter.encode(IDS[15:24]), 15, 4),  # at the rotary positions of other tokens, as in APE
        PlacedSpan(adapter.encode(IDS[31:52]), 31, 40),
    ]

    def materialized(placed):
        kv_cache = adapter.new_cache(N, placed)
        return [kv_cache._shared.materialize(layer, some.kv[0, 0][None]) for layer in layers]

    whole, backwards = materialized(spans), materialized(spans[::-1])
    alone = [materialized([span]) for span in spans]
    monkeypatch.setattr("kvweave.models.fused_cache.ROTATED_TOKENS", 7)
    in_pieces = materialized(spans)
    for layer in layers:
        for kind in (0, 1):
            placed = whole[layer][kind]
            assert torch.equal(placed, backwards[layer][kind])
            assert torch.equal(placed, in_pieces[layer][kind])
            for span, by_itself in zip(spans, alone, strict=True):
                at = slice(span.start, span.end)
                assert torch.equal(placed[:, :, at], by_itself[layer][kind][:, :, at])
            for start, end in ((0, 3), (24, 31), (52, N)):
                assert not placed[:, :, start:end].any()


def test_overlapping_spans_are_refused():
    adapter = quiet_adapter("llama")
    kv = adapter.encode(IDS[:20])
    with pytest.raises(InvalidRequest, match="positions 0 to 19 and again at 19"):
        adapter.new_cache(N, [PlacedSpan(kv, 19, 19), PlacedSpan(kv, 0, 0)])
