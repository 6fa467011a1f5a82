"""An offloaded cache is freed with its last reference: its frames hold up to `resident_bytes`."""

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import StoreError
from kvweave.testing import tiny_adapter
from support.synthetic import Text, geometry, settings

TIGHT = {"kv_budget": 1.0, "resident_bytes": 80_000}


@pytest.fixture
def left() -> Iterator[Callable[[OffloadedCache], Callable[[], list[str]]]]:
    """Return the classes of a cache's parts that are alive, with garbage collection of cycles off."""

    def parts_of(cache: OffloadedCache) -> Callable[[], list[str]]:
        store = cache.shared.store
        parts = (cache, store, store.pages, store.page_cache, store.page_cache.frames, *cache.layers)
        refs = [weakref.ref(part) for part in (*parts, *(layer.retriever for layer in cache.layers))]
        return lambda: [type(part).__name__ for part in (ref() for ref in refs) if part is not None]

    gc.collect()
    gc.disable()
    yield parts_of
    gc.enable()


def test_a_closed_cache_needs_no_garbage_collection(left, tmp_path):
    cache = OffloadedCache(geometry(layers=3), settings(**TIGHT, folder=tmp_path))
    text = Text(cache, layers=3)
    text.begin(400)
    for _ in range(20):
        text.step()
    assert cache.counts.prefetched > 0
    alive = left(cache)
    cache.close()
    del cache, text
    assert alive() == []


def test_nor_does_one_that_a_model_continued_from(left, tmp_path):
    adapter = tiny_adapter()
    cache = OffloadedCache(adapter.geometry, settings(kv_budget=0.5, resident_bytes=300_000, folder=tmp_path))
    adapter.append(cache, list(range(3, 103)))
    adapter.step(cache, 3)
    alive = left(cache)
    cache.close()
    del cache
    assert alive() == []


def test_nor_does_one_whose_disk_failed(left, tmp_path, monkeypatch):
    cache = OffloadedCache(geometry(), settings(**(TIGHT | {"resident_bytes": 40_000}), folder=tmp_path))
    text = Text(cache)
    text.begin(400)
    alive = left(cache)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with suppress(StoreError):
        for _ in range(40):
            text.step()
    assert not cache.usable
    cache.close()
    del cache, text
    assert alive() == []
