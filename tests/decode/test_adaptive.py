"""Clusters that follow the keys: nothing is lost, the statistics are those of the entries, buffers are bounded."""

from collections import Counter

import pytest
import torch
from driving import HEADS, Text, geometry, members, settings, stored, watched_attention
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import PageCacheSettings

LAYERS, TIGHT = 3, 60_000
"""Of a text, so that clusters of one layer are fetched while another attends; and bytes that hold a part of most."""


@pytest.mark.timeout(1200)  # many small cases: seconds on an idle machine
@how(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    begin=st.integers(0, 120),
    passes=st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=8, max_size=25),
    budget=st.sampled_from([0.1, 0.4, 30, 1.0]),
    largest=st.integers(2, 24),
    buffer=st.integers(0, 6),
    spread=st.sampled_from([0.3, 1.0, 2.0]),
    split=st.sampled_from(["delayed", "immediate"]),
    layout=st.sampled_from(["dual-head", "packed"]),
    replacement=st.sampled_from(["cluster", "lru", "lfu"]),
    page_bytes=st.sampled_from([64, 128, 512]),
    tails=st.integers(1, 4),
    tight=st.booleans(),
)
def test_nothing_is_ever_lost_or_doubled(
    seed, begin, passes, budget, largest, buffer, spread, split, layout, replacement, page_bytes, tails, tight
):
    chosen = settings(
        kv_budget=budget,
        resident_bytes=TIGHT if tight else None,
        clusters={
            "mean_entries": max(1, largest // 2),
            "max_entries": largest,
            "buffer_entries": buffer,
            "spread": spread,
            "split": split,
        },
        flash={"page_bytes": page_bytes, "tail_pages": tails, "layout": layout},
        residency=PageCacheSettings(replacement=replacement),
    )
    with OffloadedCache(geometry(LAYERS), chosen) as held:
        text = Text(held, seed, layers=LAYERS)
        text.begin(begin)
        for rows in passes:
            text.step(rows)
        for layer in range(LAYERS):
            assert stored(held, layer) == [Counter(range(text.length))] * HEADS
            check_statistics(held, layer)
            retriever = held.layers[layer].retriever
            assert retriever.waiting.count.max() <= buffer
            assert retriever.table.sizes.max(initial=0) <= max(largest, (largest + buffer + 1) // 2)
        assert not tight or held.counts.peak_resident_bytes <= TIGHT


def check_statistics(held, layer=0):
    """Size, centroid, variance and checksum of every cluster, from its entries."""
    table, store = held.parts.store.tables[layer], held.parts.store
    for head in range(HEADS):
        for cluster in range(int(table.count[head])):
            keys, _ = members(held, layer, head, cluster)
            centroid = keys.mean(0)
            assert len(keys) == table.sizes[head, cluster] > 0
            kept = held.parts.representatives.of(layer)[head, cluster]
            torch.testing.assert_close(kept, centroid, atol=1e-3, rtol=1e-3)
            variance = float((keys - centroid).square().sum(-1).mean())
            assert float(table.variances[head, cluster]) == pytest.approx(variance, abs=1e-2, rel=1e-2)
            entries = store.entries(layer, head, cluster)
            assert store.form.checksum(entries) == int(table.checksums[head, cluster])


def wide(**clusters):
    """Clusters that a drifting text soon makes too wide, and a budget under which few are in memory."""
    return settings(
        kv_budget=24,
        resident_bytes=26_000,
        sinks=2,
        window=4,
        clusters={"spread": 0.8, **clusters},
        residency=PageCacheSettings(prefetch=0),
    )


def test_waiting_entries_are_attended_to_in_every_step(monkeypatch):
    with OffloadedCache(geometry(), wide(buffer_entries=6)) as held:
        text = Text(held)
        text.begin(300)
        waited = 0
        for _ in range(150):
            waiting = held.layers[0].retriever.waiting
            marks = [
                held.parts.store.form.decode(waiting._entries[head, : waiting.count[head]])[1][:, 0]
                .int()
                .tolist()
                for head in range(HEADS)
            ]
            with watched_attention(monkeypatch) as seen:
                text.step()
            waited += sum(map(len, marks))
            for head in range(HEADS):
                assert set(marks[head]) <= set(seen[head])
        assert waited > 0


def test_a_delayed_split_reads_less_than_one_at_once():
    read = {}
    for split in ("delayed", "immediate"):
        with OffloadedCache(geometry(), wide(split=split, buffer_entries=6)) as held:
            text = Text(held)
            text.begin(300)
            for _ in range(200):
                text.step()
            assert held.counts.splits > 0
            read[split] = held.counts.split_bytes_read
    assert read["delayed"] < read["immediate"]


def test_a_full_buffer_splits_the_cluster_that_most_wait_for(monkeypatch):
    with OffloadedCache(geometry(), wide(buffer_entries=2)) as held:
        text = Text(held)
        text.begin(300)
        retriever = held.layers[0].retriever
        asked = []
        original = type(retriever.waiting).fullest
        monkeypatch.setattr(
            type(retriever.waiting),
            "fullest",
            lambda own, head: (
                asked.append((Counter(own._owners[head, : own.count[head]].tolist()), original(own, head)))
                or asked[-1][1]
            ),
        )
        for _ in range(200):
            text.step()
        assert held.counts.forced_splits == len(asked) > 0
        for waiting, split in asked:
            assert waiting[split] == max(waiting.values())


def test_static_clusters_grow_wider_than_adaptive_ones():
    """The distribution shift that the paper describes (§2.3), on keys that drift."""
    variance = {}
    for strategy in ("dynakv", "static"):
        with OffloadedCache(geometry(), settings(strategy=strategy)) as held:
            text = Text(held)
            text.begin(100)
            for _ in range(300):
                text.step()
            table = held.parts.store.tables[0]
            variance[strategy] = float((table.sizes * table.variances).sum() / table.sizes.sum())
    assert variance["dynakv"] < variance["static"] / 1.5


def test_two_equal_entries_are_split_in_half():
    """A cluster of coinciding keys has no two means: it is cut by number."""
    with OffloadedCache(geometry(), settings(clusters={"max_entries": 4, "mean_entries": 2})) as held:
        text = Text(held)
        original = text._entries

        def coinciding(count):
            keys, values = original(count)
            return keys.zero_(), values

        text._entries = coinciding
        for _ in range(60):
            text.step()
        assert held.parts.store.tables[0].sizes.max() <= 4
        assert stored(held) == [Counter(range(text.length))] * HEADS
