"""KV under retrieval goes with its last reference: up to `resident_bytes` of it are in frames."""

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from driving import Text, geometry, settings

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import StoreError
from kvweave.testing import tiny_adapter

TIGHT = {"kv_budget": 1.0, "resident_bytes": 80_000}


@pytest.fixture
def left() -> Iterator[Callable[[OffloadedCache], Callable[[], list[str]]]]:
    """Says what is alive of a text, by the class of each part; the collector of cycles is off meanwhile."""

    def parts_of(held: OffloadedCache) -> Callable[[], list[str]]:
        store = held.parts.store
        parts = (held, store, store.pages, store.residents, store.residents.frames, *held.layers)
        refs = [weakref.ref(part) for part in (*parts, *(layer.retriever for layer in held.layers))]
        return lambda: [type(part).__name__ for part in (ref() for ref in refs) if part is not None]

    gc.collect()
    gc.disable()
    yield parts_of
    gc.enable()


def test_a_closed_text_does_not_wait_for_the_collector_of_cycles(left, tmp_path):
    held = OffloadedCache(geometry(layers=3), settings(**TIGHT, folder=tmp_path))
    text = Text(held, layers=3)
    text.begin(400)
    for _ in range(20):
        text.step()
    assert held.counts.prefetched > 0
    alive = left(held)
    held.close()
    del held, text
    assert alive() == []


def test_nor_does_one_that_a_model_went_on_from(left, tmp_path):
    adapter = tiny_adapter()
    held = OffloadedCache(adapter.geometry, settings(kv_budget=0.5, resident_bytes=300_000, folder=tmp_path))
    adapter.extend(held, list(range(3, 103)))
    adapter.step(held, 3)
    alive = left(held)
    held.close()
    del held
    assert alive() == []


def test_nor_does_one_whose_disk_failed(left, tmp_path, monkeypatch):
    held = OffloadedCache(geometry(), settings(**(TIGHT | {"resident_bytes": 40_000}), folder=tmp_path))
    text = Text(held)
    text.begin(400)
    alive = left(held)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with suppress(StoreError):
        for _ in range(40):
            text.step()
    assert not held.usable
    held.close()
    del held, text
    assert alive() == []
