"""Adaptive clusters: no entry is lost, statistics match the entries, buffers are bounded."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.handoff import offload
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.testing import tiny_adapter
from kvweave_lab.strategies.centroid import CentroidSettings
from kvweave_lab.strategies.centroids import Centroids
from support.synthetic import HEADS, Text, geometry, members, settings, stored, watched_attention

LAYERS, TIGHT = 2, 60_000
"""Several layers, so that clusters of one are prefetched while another attends; bytes that hold only part of most texts."""


@pytest.mark.timeout(1200)  # many small cases: seconds on an idle machine
@how(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    begin=st.integers(0, 90),
    passes=st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=4, max_size=12),
    budget=st.sampled_from([0.1, 0.4, 30, 1.0]),
    largest=st.integers(2, 24),
    buffer=st.integers(0, 6),
    spread=st.sampled_from([0.3, 1.0, 2.0]),
    page_bytes=st.sampled_from([64, 128, 512]),
    tails=st.integers(1, 4),
    tight=st.booleans(),
)
def test_no_entry_is_lost_or_duplicated(
    seed, begin, passes, budget, largest, buffer, spread, page_bytes, tails, tight
):
    chosen = settings(
        strategy="dynakv",
        kv_budget=budget,
        resident_bytes=TIGHT if tight else None,
        clusters=CentroidSettings(
            mean_entries=max(1, largest // 2), max_entries=largest, buffer_entries=buffer, spread=spread
        ),
        disk={"page_bytes": page_bytes, "tail_pages": tails},
    )
    with OffloadedCache(geometry(LAYERS), chosen) as cache:
        text = Text(cache, seed, layers=LAYERS)
        text.begin(begin)
        for rows in passes:
            text.step(rows)
        for layer in range(LAYERS):
            assert stored(cache, layer) == [Counter(range(text.length))] * HEADS
            check_statistics(cache, layer)
            retriever = cache.layers[layer].retriever
            assert retriever.buffer.count.max() <= buffer
            assert retriever.table.sizes.max(initial=0) <= max(largest, (largest + buffer + 2) // 2)
        assert not tight or cache.counts.peak_resident_bytes <= TIGHT


def check_statistics(cache, layer=0):
    """Check size, centroid, variance and checksum of every cluster against its entries."""
    table, store, index = cache.shared.store.tables[layer], cache.shared.store, cache.shared.index
    variances = cache.layers[layer].retriever.variances
    for head in range(HEADS):
        for cluster in range(int(table.count[head])):
            keys, _ = members(cache, layer, head, cluster)
            centroid = keys.mean(0)
            assert len(keys) == table.sizes[head, cluster] > 0
            stored_centroid = index.get(layer)[head, cluster]
            torch.testing.assert_close(stored_centroid, centroid, atol=1e-3, rtol=1e-3)
            variance = float((keys - centroid).square().sum(-1).mean())
            assert float(variances.of[head, cluster]) == pytest.approx(variance, abs=1e-2, rel=1e-2)
            entries = store.entries(layer, head, cluster)
            assert store.entry_format.checksum(entries) == int(table.checksums[head, cluster])


def wide(**clusters):
    """Return settings under which a drifting text soon widens clusters too far, and few are in memory."""
    return settings(
        strategy="dynakv",
        kv_budget=24,
        resident_bytes=26_000,
        sinks=2,
        window=4,
        clusters=CentroidSettings(**{"mean_entries": 8, "max_entries": 16, "spread": 0.8, **clusters}),
    )


def test_buffered_entries_are_attended_to_in_every_step(monkeypatch):
    with OffloadedCache(geometry(), wide(buffer_entries=6)) as cache:
        text = Text(cache)
        text.begin(300)
        total = 0
        for _ in range(150):
            buffer = cache.layers[0].retriever.buffer
            marks = [
                cache.shared.store.entry_format.decode(buffer.entries[head, : buffer.count[head]])[1][:, 0]
                .int()
                .tolist()
                for head in range(HEADS)
            ]
            with watched_attention(monkeypatch) as seen:
                text.step()
            total += sum(map(len, marks))
            for head in range(HEADS):
                assert set(marks[head]) <= set(seen[head])
        assert total > 0


def test_a_full_buffer_splits_the_cluster_with_most_buffered_entries(monkeypatch):
    with OffloadedCache(geometry(), wide(buffer_entries=2)) as cache:
        text = Text(cache)
        text.begin(300)
        retriever = cache.layers[0].retriever
        calls = []
        original = type(retriever.buffer).fullest
        monkeypatch.setattr(
            type(retriever.buffer),
            "fullest",
            lambda own, head: (
                calls.append((Counter(own._owners[head, : own.count[head]].tolist()), original(own, head)))
                or calls[-1][1]
            ),
        )
        for _ in range(200):
            text.step()
        assert cache.counts.forced_splits == len(calls) > 0
        for buffered, split in calls:
            assert buffered[split] == max(buffered.values())


def test_two_equal_entries_are_split_in_half():
    """A cluster of equal keys has no two means, so it is split by number."""
    with OffloadedCache(geometry(), settings(strategy="dynakv", clusters=CentroidSettings(2, 4))) as cache:
        text = Text(cache)
        original = text.entries

        def coinciding(count):
            keys, values = original(count)
            return keys.zero_(), values

        text.entries = coinciding
        for _ in range(60):
            text.step()
        assert cache.shared.store.tables[0].sizes.max() <= 4
        assert stored(cache) == [Counter(range(text.length))] * HEADS


def test_memory_is_flat_in_the_length_under_an_absolute_budget():
    """Only one layer's centroids grow, at the expense of frames; the total stays the same."""
    chosen = settings(kv_budget=60, resident_bytes=60_000, strategy="dynakv")
    with OffloadedCache(geometry(), chosen) as cache:
        text = Text(cache)
        text.begin(100)
        for _ in range(500):
            text.step()
            assert cache.resident_bytes <= 60_000
        dense = text.length * 2 * 2 * 8 * 4
        assert cache.counts.peak_resident_bytes < dense


def test_centroids_are_prefetched_before_a_layer_projects_its_query(monkeypatch):
    adapter = tiny_adapter("llama")
    ids = torch.randint(3, 260, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    kv_cache = adapter.new_cache(len(ids))
    adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    events: list[tuple[str, int]] = []
    for index, layer in enumerate(adapter.model.model.layers):
        layer.self_attn.q_proj.register_forward_pre_hook(
            lambda module, given, index=index: events.append(("project", index))
        )
    prefetch, attend = Centroids.prefetch, OffloadedCache.attend
    monkeypatch.setattr(
        Centroids,
        "prefetch",
        lambda self, index: (events.append(("prefetch", index)), prefetch(self, index))[1],
    )
    monkeypatch.setattr(
        OffloadedCache,
        "attend",
        lambda self, call, rows: (events.append(("attend", call.layer)), attend(self, call, rows))[1],
    )
    with offload(
        adapter, kv_cache, ids, OffloadSettings(0.5, strategy="dynakv", window=8), question_tokens=16
    ) as cache:
        events.clear()
        adapter.step(cache, 5)
    for index in range(adapter.geometry.layers):
        own = [name for name, layer in events if layer == index]
        assert own[:3] == ["prefetch", "project", "attend"]
