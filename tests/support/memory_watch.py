"""Measures the memory of an offloaded cache whenever something of it may grow."""

from math import prod

from kvweave.decode.clusters.outlines import Outlines
from kvweave.decode.layer import RecentWindow
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.store.frames import FramePool


class Watch:
    """Measures what a cache holds before and after everything that can grow it.

    Of each class, the methods after which it is measured, each with a function that returns the bytes it takes meanwhile. `more`
    are those of a strategy.
    """

    def __init__(self, monkeypatch, more=None) -> None:
        self.cache: OffloadedCache | None = None
        self.most = 0
        self.grown: set[str] = set()
        patched = {
            RecentWindow: {"append": nothing, "_reallocate": _new_window},
            Outlines: {"_grow": _new_outlines},
            FramePool: {"allocate": nothing},
            **(more or {}),
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
    return layers + shared.index.resident_bytes + buffers + shared.store.page_cache.frames.touched_bytes


def nothing(*args) -> int:
    return 0


def _new_window(window, like, capacity) -> int:
    return like[:, :, :1].nbytes * capacity


def _new_outlines(outlines, name, capacity) -> int:
    like = getattr(outlines, name)
    axis = 2 if name == "_codes" else 1  # of entries or clusters
    return like.itemsize * capacity * prod(size for number, size in enumerate(like.shape) if number != axis)
