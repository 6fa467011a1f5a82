"""The memory limit holds at every moment: also while something grows, when old and new memory exist at once."""

from collections import Counter
from dataclasses import replace

import pytest

from kvweave.decode.clusters.buffers import BufferedEntries
from kvweave.decode.clusters.outlines import Outlines
from kvweave.decode.disk.centroids import SPARE_COLUMNS, Centroids
from kvweave.decode.layer import RecentWindow
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.store.frames import FramePool
from support.synthetic import CLUSTERED, HEADS, Text, geometry, settings, stored

LAYERS, LIMIT, PROMPT = 2, 40_000, 80
"""A limit that every text here outgrows; a prompt with more clusters than a layer has spare columns for."""


class Watch:
    """Measures what a cache holds before and after everything that can grow it."""

    def __init__(self, monkeypatch) -> None:
        self.cache: OffloadedCache | None = None
        self.most = 0
        self.grown: set[str] = set()
        patched = {
            RecentWindow: {"append": _nothing, "_reallocate": _new_window},
            BufferedEntries: {"add": _new_buffer},
            Centroids: {"prefetch": _nothing, "put": _nothing, "_widen": _new_centroids},
            Outlines: {"_grow": _new_outlines},
            FramePool: {"allocate": _nothing},
        }
        for kind, methods in patched.items():
            for name, during in methods.items():
                monkeypatch.setattr(kind, name, self._watched(name, getattr(kind, name), during))

    def _watched(self, name, original, during):
        def method(own, *args):
            extra = during(own, *args)
            if extra:
                self.grown.add(name)
            self._measure(extra)
            found = original(own, *args)
            self._measure(0)
            return found

        return method

    def _measure(self, extra: int) -> None:
        if self.cache is not None:
            self.most = max(self.most, held(self.cache) + extra)


def held(cache: OffloadedCache) -> int:
    """Return the memory in use now, also where the cache has not measured it yet."""
    layers = sum(layer.recent.resident_bytes + layer.retriever.resident_bytes for layer in cache.layers)
    shared, limit = cache.shared, cache.limit
    buffers = shared.store.pages.buffer_bytes + limit.workspace_bytes
    return layers + shared.centroids.resident_bytes + buffers + shared.store.page_cache.frames.touched_bytes


def forget_centroids(cache: OffloadedCache) -> None:
    """Leave centroids on disk alone, as they are when a kept text is continued."""
    for layer, own in enumerate(cache.shared.centroids.layers):
        cache.shared.centroids.release(layer, write=True)
        own.memory, own.buffer, own.ready = None, None, False


def _nothing(*args) -> int:
    return 0


def _new_window(window, like, capacity) -> int:
    return like[:, :, :1].nbytes * capacity


def _new_buffer(buffer, head, owner, entry) -> int:
    heads, capacity, length = buffer.entries.shape
    return heads * (capacity + max(4, capacity)) * length if buffer.count[head] == capacity else 0


def _new_outlines(outlines, name, capacity) -> int:
    like = getattr(outlines, name)
    return like.shape[0] * capacity * like.shape[2:].numel() * like.itemsize


def _new_centroids(centroids, own, columns) -> int:
    return own.memory[:1].nbytes * (columns + SPARE_COLUMNS) if columns > own.memory.shape[0] else 0


@pytest.mark.parametrize("strategy", CLUSTERED)
@pytest.mark.parametrize("seed", range(2))
def test_memory_stays_within_the_limit_while_it_grows(monkeypatch, strategy, seed):
    watch = Watch(monkeypatch)
    chosen = settings(
        kv_budget=1.0 if strategy != "outline" else 1_000,  # all of it, but outlines are kept
        resident_bytes=LIMIT,
        strategy=strategy,
        clusters={"mean_entries": 2, "max_entries": 4, "buffer_entries": 6, "spread": 0.3},
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
        own = (
            {"_grow"} if strategy == "outline" else {"_widen"} if strategy == "static" else {"_widen", "add"}
        )
        assert watch.grown == {"_reallocate"} | own


def test_a_window_is_trimmed_once_its_copy_fits(monkeypatch):
    with OffloadedCache(geometry(), settings(resident_bytes=LIMIT)) as cache:
        layer, text = cache.layers[0], Text(cache)
        limit = cache.limit
        room = LIMIT - limit.bytes_without_frames()
        assert limit.has_room(room)
        assert not limit.has_room(room + 1)
        text.begin(PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "hooks", replace(layer.hooks, has_room=lambda more_bytes: False))
            text.step(60)
            assert layer.recent.trim_bytes
        text.step()
        assert not layer.recent.trim_bytes
        assert stored(cache) == [Counter(range(text.length))] * HEADS
