"""The device tier: KV that lies on the device already, ready to be placed, under a hard cap.

Holds tensors and not the stored bytes: there is nothing left to verify or unpack. A copy of what a slower tier has, and
gone with the process. On a CPU, whose memory is the host's, there is none.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from kvweave.core import ChunkKV
from kvweave.store.tiers.residents import Residents


class DeviceTier:
    """KV on `device`, as `Residents` decides.

    Args:
        device: where the model is.
        limit_bytes: the cap, of the tensors' sizes.
        in_use: the keys of what may not go.
    """

    def __init__(
        self, device: torch.device, limit_bytes: int, in_use: Callable[[], Collection[str]] = tuple
    ) -> None:
        self.device = device
        self.residents: Residents[ChunkKV] = Residents(limit_bytes, in_use)

    def content(self, key: str) -> ChunkKV | None:
        """The KV if it is here; nobody writes to it."""
        return self.residents.get(key)

    def admit(self, key: str, kv: ChunkKV, standing: float) -> bool:
        """Hold a copy on the device if it is worth it; whether it is held now. Raises DamagedEntry as `kv.kv` does."""
        numbers = torch.Size(kv.held.shape).numel()
        if kv.queries is not None:
            numbers += torch.Size(kv.queries.shape).numel()
        size_bytes = numbers * kv.held.dtype.itemsize
        if not self.residents.admits(key, size_bytes, standing):
            return False
        queries = kv.queries if isinstance(kv.queries, Tensor | None) else kv.queries.whole()
        there = None if queries is None else queries.to(self.device, copy=True)
        held = ChunkKV(kv.token_ids, kv.kv.to(self.device, copy=True), there)
        return self.residents.admit(key, held, size_bytes, standing) is not None
