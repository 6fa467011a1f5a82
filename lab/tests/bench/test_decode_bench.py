"""The decode bench on a tiny model: its rows have the requested lengths and strategies, and count what was read."""

from dataclasses import replace

import pytest

from kvweave.decode.settings import ClusterSettings, OffloadSettings
from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.models.fused_cache import FusedCache
from kvweave.testing import tiny_adapter
from kvweave_lab.bench import decode
from kvweave_lab.bench.decode import bench_decode
from kvweave_lab.eval.decoding.measure import variant_named
from kvweave_lab.strategies import STRATEGIES

KV = OffloadSettings(0.3, 300_000, window=8, clusters=ClusterSettings(8, 16))


def test_rows_for_every_length_and_strategy(tmp_path):
    adapter = tiny_adapter()
    names = ["dynakv/packed", *(name for name in STRATEGIES if name != "dense")]
    chosen = [(name, variant_named(name, KV)) for name in names]
    rows = list(bench_decode(adapter, tmp_path, chosen, [200, 300], steps=3))
    named = [(row.strategy, row.decode_tokens) for row in rows]
    assert named == [(name, n) for n in (200, 300) for name in ("dense", *names)]
    for row in rows:
        assert row.steps == 3
        assert (
            0 < row.latency_s_per_token.low <= row.latency_s_per_token.median <= row.latency_s_per_token.high
        )
        assert row.dense_kv_bytes == row.decode_tokens * adapter.geometry.token_bytes
        if row.strategy == "dense":
            assert row.decoding is None
            assert row.of_dense is None
            continue
        assert 0 < row.of_dense.low <= row.of_dense.median <= row.of_dense.high
        assert row.decode_tokens == 300 or row.growth_of_dense is None
        heads = adapter.geometry.layers * adapter.geometry.kv_heads
        assert row.decoding.attended_per_token <= heads * (0.3 * (row.decode_tokens + 8) + 1)
        assert row.decoding.resident_bytes <= 300_000
    assert list(tmp_path.iterdir()) == []


def test_growth_is_compared_with_dense_decodings_unless_that_does_not_grow(tmp_path, monkeypatch):
    adapter = tiny_adapter()
    step_s = {(True, 200): 2.0, (True, 300): 4.0, (False, 200): 5.0, (False, 300): 6.0}

    def steps(_, text, tokens):
        return [step_s[isinstance(text, FusedCache), text.positions.numel()]] * len(tokens)

    monkeypatch.setattr(decode, "_steps", steps)
    rows = {
        (row.strategy, row.decode_tokens): row
        for row in bench_decode(adapter, tmp_path, [("dynakv", KV)], [300, 200], steps=3)
    }
    assert rows["dynakv", 200].of_dense.median == 2.5
    assert rows["dynakv", 300].of_dense.median == 1.5
    assert rows["dynakv", 300].growth_of_dense.median == 0.5
    step_s[True, 300] = 2.0
    rows = bench_decode(adapter, tmp_path, [("dynakv", KV)], [200, 300], steps=3)
    assert [row.growth_of_dense for row in rows] == [None] * 4


def test_dense_decoding_may_run_alone_or_be_left_out(tmp_path):
    adapter = tiny_adapter()
    (dense,) = bench_decode(adapter, tmp_path, [], [200], steps=3)
    assert (dense.strategy, dense.decode_tokens) == ("dense", 200)
    (row,) = bench_decode(adapter, tmp_path, [("dynakv", KV)], [200], steps=3, dense=False)
    assert row.of_dense is None
    assert row.resident_bound_bytes == 300_000


def test_the_entries_strategy_reads_all_keys(tmp_path):
    adapter = tiny_adapter()
    (_, row) = bench_decode(adapter, tmp_path, [("entries", replace(KV, strategy="entries"))], [300], steps=3)
    g = adapter.geometry
    keys = g.layers * g.kv_heads * (300 - 12) * g.head_width * 4
    assert row.decoding.bytes_per_token >= keys // 4096 * 4096 - g.layers * g.kv_heads * 4096


@pytest.mark.parametrize(("length", "steps", "kind"), [(100, 0, InvalidRequest), (510, 8, PromptTooLong)])
def test_impossible_measurements_are_refused(tmp_path, length, steps, kind):
    with pytest.raises(kind):
        list(bench_decode(tiny_adapter(), tmp_path, [("dynakv", KV)], [length], steps=steps))
