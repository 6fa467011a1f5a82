"""Strategies with centroids keep to the memory limit at every moment, as kvweave's own does."""

from collections import Counter

import pytest

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave_lab.strategies.buffers import BufferedEntries
from kvweave_lab.strategies.centroid import CentroidSettings
from kvweave_lab.strategies.centroids import SPARE_COLUMNS, Centroids
from support.memory_watch import Watch, nothing
from support.synthetic import HEADS, Text, geometry, settings, stored

LAYERS, LIMIT, PROMPT = 2, 40_000, 80
"""A limit that every text here outgrows; a prompt with more clusters than a layer has spare columns for."""


def forget_centroids(cache: OffloadedCache) -> None:
    """Leave centroids on disk alone, as they are between passes."""
    for layer, own in enumerate(cache.shared.index.layers):
        cache.shared.index.release(layer, write=True)
        own.memory, own.buffer, own.ready = None, None, False


def _new_buffer(buffer, head, owner, entry) -> int:
    heads, capacity, length = buffer.entries.shape
    return heads * (capacity + max(4, capacity)) * length if buffer.count[head] == capacity else 0


def _new_centroids(centroids, own, columns) -> int:
    return own.memory[:1].nbytes * (columns + SPARE_COLUMNS) if columns > own.memory.shape[0] else 0


@pytest.mark.parametrize("strategy", ["dynakv", "static", "local"])
@pytest.mark.parametrize("seed", range(2))
def test_memory_stays_within_the_limit_while_it_grows(monkeypatch, strategy, seed):
    watch = Watch(
        monkeypatch,
        {
            BufferedEntries: {"add": _new_buffer},
            Centroids: {"prefetch": nothing, "put": nothing, "_widen": _new_centroids},
        },
    )
    chosen = settings(
        kv_budget=1.0,
        resident_bytes=LIMIT,
        strategy=strategy,
        clusters=CentroidSettings(2, 4, spread=0.3, buffer_entries=6),
        disk={"page_bytes": 64},
    )
    with OffloadedCache(geometry(LAYERS), chosen) as watch.cache:
        text = Text(watch.cache, seed, layers=LAYERS)
        text.begin(PROMPT)
        forget_centroids(watch.cache)
        for rows in [1, 25, 1, 5, 1]:
            text.step(rows)
        for layer in range(LAYERS):
            assert stored(watch.cache, layer) == [Counter(range(text.length))] * HEADS
        assert watch.cache.counts.peak_resident_bytes <= watch.most <= LIMIT
        assert watch.cache.shared.store.page_cache.frames.withdrawn  # the limit was reached
        assert watch.grown == {"_reallocate", "_widen"} | ({"add"} if strategy != "static" else set())
