"""Copies of clusters in the memory of the model's device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import ClusterKey, ClusterKeys
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.page_cache.frames import FrameAllocator, gather_pages
from kvweave.decode.page_cache.page_cache import PageCache


class DeviceCache:
    """`count` pages on `device`, (count, page bytes) uint8, and in `page_cache` the clusters that they hold."""

    def __init__(
        self, device: torch.device, count: int, page_bytes: int, replacement: str, layers: int, heads: int
    ) -> None:
        self.pages = torch.zeros(count, page_bytes, dtype=torch.uint8, device=device)
        self.page_cache = PageCache(
            FrameAllocator(count, page_bytes), replacement, DecodeCounts(), layers, heads
        )

    def missing(self, keys: ClusterKeys) -> NDArray[np.int64]:
        """Return the clusters that are not here, (m, 3), and pin the others."""
        self.page_cache.pin(keys)
        return self.page_cache.missing(keys)

    def copy(self, key: ClusterKey, memory: Tensor, frames: Sequence[int]) -> None:
        """Copy a cluster from these frames of `memory` (n, page bytes), and pin it."""
        own = self.page_cache.allocate(len(frames))
        self.pages[own] = gather_pages(memory, torch.tensor(frames, dtype=torch.long)).to(self.pages.device)
        self.page_cache.insert(key, own)
        self.page_cache.pin([key])

    def invalidate(self, key: ClusterKey) -> None:
        """Discard the copy of a cluster that has changed, if there is one."""
        if key in self.page_cache:
            self.page_cache.frames.free(self.page_cache.remove(key))
