"""Clusters on the model's device: copies of what is in memory, made when they are attended to, under a bound of their own.

A copy is whole, and goes when its cluster changes or when room is needed. Knows nothing of files, nor of what is attended to.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import Key, Keys
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.residency.frames import FrameNumbers, rows_of
from kvweave.decode.residency.residents import Residents


class DevicePages:
    """`count` pages on `device`, `pages` (count, page bytes) uint8, and the clusters that lie in them."""

    def __init__(
        self, device: torch.device, count: int, page_bytes: int, replacement: str, layers: int, heads: int
    ) -> None:
        self.pages = torch.zeros(count, page_bytes, dtype=torch.uint8, device=device)
        self.residents = Residents(
            FrameNumbers(count, page_bytes), replacement, DecodeCounts(), layers, heads
        )

    def missing(self, keys: Keys) -> NDArray[np.int64]:
        """Those that are not here; the others stay until the residents' `release`."""
        self.residents.pin(keys)
        return self.residents.missing(keys)

    def copy(self, key: Key, memory: Tensor, frames: Sequence[int]) -> None:
        """Bring a cluster here from these frames of `memory` (n, page bytes); it stays until the residents' `release`."""
        own = self.residents.room(len(frames))
        self.pages[own] = rows_of(memory, torch.tensor(frames, dtype=torch.long)).to(self.pages.device)
        self.residents.put(key, own)
        self.residents.pin([key])

    def forget(self, key: Key) -> None:
        """The cluster has changed: the copy here, if there is one, is none any more."""
        if key in self.residents:
            self.residents.frames.give(self.residents.drop(key))
