"""What each technique of kvweave's strategy is good for: without it, more is read, moved or held."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.store.page_cache import ClusterUsage
from kvweave.ops.partial_attention import PartialAttention
from kvweave_lab.strategies.ablations import lfu_scores, lru_scores
from kvweave_lab.strategies.centroid import CentroidSettings
from kvweave_lab.strategies.clustered import StaticClusters
from kvweave_lab.strategies.packed import PackedRegions
from support.synthetic import HEADS, Text, geometry, settings

WIDE = settings(
    kv_budget=24,
    resident_bytes=26_000,
    sinks=2,
    window=4,
    clusters=CentroidSettings(8, 16, spread=0.8, buffer_entries=6),
)
"""Under these a drifting text soon widens clusters too far, and few are in memory."""


def test_delayed_splits_read_less_than_immediate_ones():
    read = {}
    for strategy in ("dynakv", "dynakv-immediate-split"):
        with OffloadedCache(geometry(), replace(WIDE, strategy=strategy)) as cache:
            text = Text(cache)
            text.begin(300)
            for _ in range(200):
                text.step()
            assert cache.counts.splits > 0
            read[strategy] = cache.counts.split_bytes_read
    assert read["dynakv"] < read["dynakv-immediate-split"]


def decoded(count: int = 60, **changes) -> tuple[DecodeCounts, torch.Tensor]:
    chosen = {"kv_budget": 60, "resident_bytes": 60_000, **changes}
    with OffloadedCache(geometry(3), settings(**chosen)) as cache:
        text = Text(cache, layers=3, steady=True)
        text.begin(400)
        for _ in range(count):
            _, output = text.step()
        assert cache.counts.peak_resident_bytes <= chosen["resident_bytes"]
        return cache.counts, output


@pytest.mark.parametrize("candidates", [1.0, 1.5])
def test_prefetch_changes_when_clusters_are_read_and_not_the_attended_entries(monkeypatch, candidates):
    """Static clusters: where clusters are split, a split needs them in memory, and prefetch brings it forward."""
    tight = {
        "strategy": "static",
        "resident_bytes": 46_000,
        "clusters": CentroidSettings(8, 16, candidates=candidates),
    }
    ahead, output = decoded(**tight)
    monkeypatch.setattr(StaticClusters, "prefetch", lambda self: None)
    alone, expected = decoded(**tight)
    assert ahead.prefetched > 0 == alone.prefetched
    assert ahead.attended == alone.attended
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert ahead.ahead_rate > 0 == alone.ahead_rate
    assert ahead.hit_rate + ahead.ahead_rate > 1.5 * alone.hit_rate


@pytest.mark.parametrize("strategy", ["dynakv", "dynakv-lru", "dynakv-lfu"])
def test_every_policy_keeps_the_limit(strategy):
    counts, _ = decoded(strategy=strategy)
    assert 0 < counts.hit_rate + counts.ahead_rate < 1


def test_paged_centroids_take_the_memory_of_one_layer_and_change_nothing():
    paged, output = decoded(count=20, resident_bytes=200_000, strategy="dynakv")
    all_held, expected = decoded(count=20, resident_bytes=200_000, strategy="dynakv-resident-centroids")
    assert paged.attended == all_held.attended
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    sizes = {}
    for strategy in ("dynakv", "dynakv-resident-centroids"):
        with OffloadedCache(geometry(3), settings(strategy=strategy)) as cache:
            text = Text(cache, layers=3)
            text.begin(400)
            text.step()
            sizes[strategy] = cache.shared.index.resident_bytes
    assert sizes["dynakv"] < sizes["dynakv-resident-centroids"] / 2


def test_lru_and_lfu_order():
    used_at, uses = np.array([90, 10, 50]), np.array([1, 9, 1])
    usage = ClusterUsage(
        used_at, np.zeros(3), uses, np.ones(3), 100 - used_at, np.zeros(3), now=100, frames=100
    )
    assert np.argsort(-lru_scores(usage)).tolist() == [1, 2, 0]
    assert np.argsort(-lfu_scores(usage)).tolist() == [2, 0, 1]


def test_growth_moves_nothing_in_pools_and_all_later_clusters_when_packed():
    moved, splits = {}, {}
    for strategy in ("static", "dynakv", "dynakv-packed"):
        with OffloadedCache(geometry(), settings(strategy=strategy)) as cache:
            text = Text(cache)
            text.begin(200)
            for _ in range(100):
                text.step()
            counts = cache.counts
            moved[strategy] = getattr(counts, "moved_bytes", 0)
            splits[strategy] = getattr(counts, "splits", 0)
    assert moved["static"] == splits["static"] == 0
    # Each split moves at least a page, at most half of the largest cluster and a new entry.
    assert 0 < 256 * splits["dynakv"] <= moved["dynakv"] <= 256 * 5 * splits["dynakv"]
    assert moved["dynakv-packed"] > 10 * moved["dynakv"]


def test_packed_homes_follow_without_gaps():
    regions = PackedRegions(4)
    first, second = regions.allocate((0, 0)), regions.allocate((0, 0))
    assert regions.make_room(first, 3) == regions.make_room(second, 2) == []
    (move,) = regions.make_room(first, 5)
    assert (move.first, move.pages, move.target) == (3, 2, 5)
    assert regions.page_numbers(np.array([second, second, first]), np.array([0, 1, 4])).tolist() == [5, 6, 4]


def test_neighbours_take_fewer_reads_than_clusters_in_the_order_made():
    """Queries retrieve the same scattered clusters again and again: as neighbours, these take fewer reads."""
    reads = {}
    for strategy in ("dynakv", "dynakv-made-order"):
        cache = OffloadedCache(
            geometry(),
            settings(kv_budget=60, resident_bytes=30_000, strategy=strategy, disk={"gap_pages": 0}),
        )
        with cache:
            text = Text(cache, seed=5)
            directions = torch.randn(3, HEADS * 2, 1, 8, generator=torch.Generator().manual_seed(9)) * 3
            keys, values = text.entries(500)
            rows = directions[torch.arange(24) % 3, :, 0].transpose(0, 1)
            cache.fill(0, keys, values, rows, None)
            retriever = cache.layers[0].retriever
            total = 0
            for direction in directions:
                attention = PartialAttention(direction[None], HEADS, scaling=8**-0.5)
                before = cache.counts.cluster_reads
                retriever.attend(attention, 60)
                total += cache.counts.cluster_reads - before
            reads[strategy] = total
    assert reads["dynakv"] < reads["dynakv-made-order"]
