"""KV, or queries, as they lie in an entry's bytes: a layer is verified when it is first asked for, and unpacked every time.

So the first layer can be used while the others are still on their way, from the disk (by itself) or from a server (see
`Coming`). Knows nothing of files and servers.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from kvweave.ops.quantise import QuantisedKV
from kvweave.store.header import as_bytes, checksum


class Coming(Protocol):
    """What brings the layers of an entry that is not all there yet."""

    def wait_for(self, layer: int) -> None:
        """Return when a layer's bytes are there, in every tensor; raises DamagedEntry if they will never be."""
        ...

    @property
    def awaited_s(self) -> float:
        """Seconds that another layer takes to come, as far as can be told; 0 once all are there."""
        ...


class VerifiedLayers:
    """Gives out verified layers only; see `kvweave.core.KVLayers`. Safe to use from several threads.

    Args:
        held: KV (L, 2, G, S, D), such KV quantised, or queries (L, H, S, D); views of the bytes that are verified.
        tensors: what it consists of, in the order of the file, each (L, …).
        checksums: the one of each layer, over its part of every tensor.
        refuse: called with the number of a layer that is not what was stored; raises.
        coming: brings the bytes where not all of them are there yet.

    Raises:
        ValueError: there are not as many checksums as layers.
    """

    def __init__(
        self,
        held: Tensor | QuantisedKV,
        tensors: Sequence[Tensor],
        checksums: Sequence[str],
        refuse: Callable[[int], NoReturn],
        coming: Coming | None = None,
    ) -> None:
        if len(checksums) != held.shape[0]:
            raise ValueError(f"{len(checksums)} checksums for {held.shape[0]} layers")
        self.held = held
        self._bytes = [as_bytes(tensor) for tensor in tensors]  # views; cheaper to slice than tensors are
        self._checksums = checksums
        self._refuse = refuse
        self._coming = coming
        self._unverified = set(range(len(checksums)))

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, G, S, D); of queries (L, H, S, D), and their layers likewise."""
        return tuple(self.held.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.held.dtype

    @property
    def nbytes(self) -> int:
        """As stored."""
        return self.held.nbytes

    @property
    def awaited_s(self) -> float:
        """As of `Coming`; 0 where nothing is to come."""
        return 0.0 if self._coming is None else self._coming.awaited_s

    def layer(self, index: int) -> Tensor:
        """One layer, (2, G, S, D), verified."""
        self.load(index)
        return self.held[index] if isinstance(self.held, Tensor) else self.held.layer(index)

    def whole(self) -> Tensor:
        """All layers, (L, 2, G, S, D), verified."""
        held = self.verified()
        return held if isinstance(held, Tensor) else held.whole()

    def verified(self) -> Tensor | QuantisedKV:
        """What is held, as it is stored, all of it verified."""
        self.verify()
        return self.held

    def verify(self) -> None:
        """Check every layer that has not been checked so far."""
        for index in sorted(self._unverified):
            self.load(index)

    def load(self, index: int) -> None:
        """Wait for, read and check one layer, if it has not been checked so far."""
        if index not in self._unverified:
            return
        if self._coming is not None:
            self._coming.wait_for(index)
        if checksum(*(self._part(data, index) for data in self._bytes)) != self._checksums[index]:
            self._refuse(index)
        self._unverified.discard(index)

    def _part(self, data: memoryview, index: int) -> memoryview:
        """One layer's bytes of a tensor."""
        size = len(data) // len(self._checksums)
        return data[index * size : (index + 1) * size]
