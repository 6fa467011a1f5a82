"""Stored tokens with gaps between their positions, and keys that are looked at before a pass."""

import pytest
import torch
from prompts import IDS, N, quiet_adapter, stale_canvas

from kvweave.core import ChunkKV
from kvweave.models.canvas import PlacedSpan


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "phi3-partial", "smollm3"])
def test_offsets_rotate_each_token_as_if_it_were_placed_alone(family):
    adapter = quiet_adapter(family)
    kv, chosen, start = adapter.encode(IDS[:20]), torch.tensor([0, 3, 4, 11, 19]), 7
    some = ChunkKV(tuple(IDS[i] for i in chosen), kv.kv[:, :, :, chosen])
    positions = torch.tensor([*(start + chosen), 40])
    together = adapter.canvas(6, [PlacedSpan(some, 0, start, chosen)], positions)
    each = [ChunkKV((IDS[i],), kv.kv[:, :, :, i : i + 1]) for i in chosen]
    alone = adapter.canvas(
        6, [PlacedSpan(one, n, start + int(chosen[n])) for n, one in enumerate(each)], positions
    )
    ids, row = [*some.token_ids, IDS[20]], torch.tensor([5])
    logits = [adapter.compute(canvas, ids, adapter.rows(row)) for canvas in (together, alone)]
    assert torch.equal(*logits)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(together.layers, alone.layers, strict=True))


@pytest.mark.parametrize("looked_at", [[0], [2], [2, 0, 1]])
def test_looking_at_a_layers_keys_first_changes_no_bit_of_what_follows(looked_at):
    adapter, rows = quiet_adapter("llama"), torch.arange(40, N)
    plain, canvas = stale_canvas(adapter), stale_canvas(adapter)
    like = adapter.encode(IDS[:1]).kv[0, 0][None]
    seen = {layer: canvas.held_keys(layer, like).clone() for layer in looked_at}
    assert torch.equal(*(adapter.compute(each, IDS, adapter.rows(rows)) for each in (plain, canvas)))
    for layer, keys in seen.items():
        assert torch.equal(keys[:, :, :40], plain.layers[layer].keys[:, :, :40])
        assert not keys[:, :, 40:].any()
    assert torch.equal(canvas.held_keys(1, like), plain.layers[1].keys[:, :, :N])


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "phi3-partial", "smollm3"])
def test_neither_the_order_of_spans_nor_how_many_tokens_rotate_at_a_time_changes_a_bit(family, monkeypatch):
    adapter = quiet_adapter(family)
    like = adapter.encode(IDS[:1]).kv[0, 0][None]
    spans = [PlacedSpan(adapter.encode(IDS[a:b]), a, a) for a, b in ((3, 15), (15, 24), (31, 52))]
    placed = [adapter.canvas(N, given) for given in (spans, spans[::-1])]
    monkeypatch.setattr("kvweave.models.canvas.ROTATED_TOKENS", 7)
    placed.append(adapter.canvas(N, spans))
    for layer in range(adapter.geometry.layers):
        whole, *others = [canvas._sheet.lay_out(layer, like) for canvas in placed[::-1]]
        for keys, values in others:
            assert torch.equal(keys, whole[0])
            assert torch.equal(values, whole[1])
        for span in spans:
            alone = adapter.canvas(N, [span]).held_keys(layer, like)
            assert torch.equal(whole[0][:, :, span.start : span.end], alone[:, :, span.start : span.end])
            assert torch.equal(whole[1][0, :, span.start : span.end], span.kv.layer(layer)[1])
        for start, end in ((0, 3), (24, 31), (52, N)):
            assert not whole[0][:, :, start:end].any()
            assert not whole[1][:, :, start:end].any()
