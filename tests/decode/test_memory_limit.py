"""The memory limit holds at every moment: also while something grows, when old and new memory exist at once."""

from collections import Counter
from dataclasses import replace

import pytest

from kvweave.decode.offloaded_cache import OffloadedCache
from support.memory_watch import Watch
from support.synthetic import HEADS, Text, geometry, settings, stored

LAYERS, LIMIT, PROMPT = 2, 40_000, 80
"""A limit that every text here outgrows."""


@pytest.mark.parametrize("seed", range(2))
def test_memory_stays_within_the_limit_while_it_grows(monkeypatch, seed):
    watch = Watch(monkeypatch)
    chosen = settings(
        kv_budget=1_000,  # all of it, but outlines are kept
        resident_bytes=LIMIT,
        clusters={"mean_entries": 2, "max_entries": 4},
        disk={"page_bytes": 64},
    )
    with OffloadedCache(geometry(LAYERS), chosen) as watch.cache:
        text = Text(watch.cache, seed, layers=LAYERS)
        text.begin(PROMPT)
        for rows in [1, 25, 1, 5, 1]:
            text.step(rows)
        for layer in range(LAYERS):
            assert stored(watch.cache, layer) == [Counter(range(text.length))] * HEADS
        assert watch.cache.counts.peak_resident_bytes <= watch.most <= LIMIT
        assert watch.cache.shared.store.page_cache.frames.withdrawn  # the limit was reached
        assert watch.grown == {"_reallocate", "_grow"}


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
