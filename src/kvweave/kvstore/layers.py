"""The layers of a stored entry: where each is in the file, and a view that verifies a layer when it is first used."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from kvweave.errors import DamagedEntry
from kvweave.kvstore.header import ByteRange, as_bytes, checksum, parse_header
from kvweave.ops.quantise import QuantisedKV


class LayerStream(Protocol):
    """Delivers the layers of an entry that is still being read."""

    def wait_for(self, layer: int) -> None:
        """Return when a layer's bytes have arrived, in every tensor; raise DamagedEntry if they never will."""
        ...

    @property
    def layer_wait_s(self) -> float:
        """Estimated seconds until another layer arrives; 0 once all have."""
        ...


class VerifiedLayers:
    """Returns verified layers only; see `kvweave.types.KVLayers`. Safe to use from several threads.

    Args:
        held: KV (L, 2, G, S, D), or such KV quantised; views of the bytes that are verified.
        tensors: the tensors that `held` consists of, in the order of the file, each (L, …).
        checksums: the checksum of each layer, over its part of every tensor.
        refuse: called with the index of a layer that does not match its checksum; raises.
        stream: delivers the bytes if not all of them have arrived yet.

    Raises:
        ValueError: the number of checksums is not the number of layers.
    """

    def __init__(
        self,
        held: Tensor | QuantisedKV,
        tensors: Sequence[Tensor],
        checksums: Sequence[str],
        refuse: Callable[[int], NoReturn],
        stream: LayerStream | None = None,
    ) -> None:
        if len(checksums) != held.shape[0]:
            raise ValueError(f"{len(checksums)} checksums for {held.shape[0]} layers")
        self.held = held
        self._bytes = [as_bytes(tensor) for tensor in tensors]  # views; cheaper to slice than tensors are
        self._checksums = checksums
        self._refuse = refuse
        self._stream = stream
        self._unverified = set(range(len(checksums)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def layer_wait_s(self) -> float:
        return 0.0 if self._stream is None else self._stream.layer_wait_s

    def layer(self, index: int) -> Tensor:
        self.load(index)
        return self.held[index] if isinstance(self.held, Tensor) else self.held.layer(index)

    def all_layers(self) -> Tensor:
        held = self.verified()
        return held if isinstance(held, Tensor) else held.all_layers()

    def verified(self) -> Tensor | QuantisedKV:
        """Verify every layer and return `held`, quantised if it is stored so."""
        self.verify()
        return self.held

    def verify(self) -> None:
        for index in sorted(self._unverified):
            self.load(index)

    def load(self, index: int) -> None:
        """Wait for one layer and check it, unless that happened before."""
        if index not in self._unverified:
            return
        if self._stream is not None:
            self._stream.wait_for(index)
        if checksum(*(self._part(data, index) for data in self._bytes)) != self._checksums[index]:
            self._refuse(index)
        self._unverified.discard(index)

    def _part(self, data: memoryview, index: int) -> memoryview:
        size = len(data) // len(self._checksums)
        return data[index * size : (index + 1) * size]


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """Where the layers of a KV file are: at its end, one tensor after the other.

    `layers` gives for each layer its byte range in every tensor that has layers. `first` is where the first range begins;
    all bytes before it are needed to parse the entry. `bytes` is the file's size.
    """

    bytes: int
    first: int
    layers: tuple[tuple[ByteRange, ...], ...]


def read_layer_ranges(beginning: Tensor, where: object) -> LayerRanges:
    """Return where the layers of an entry are, from the first bytes (n,) uint8 of its file.

    Raises:
        StoreTooNew: of a newer format version.
        DamagedEntry: the header is incomplete or altered, or the file's layers are not at its end.
    """
    try:
        metadata, _, ranges = parse_header(beginning, where)
        whole = json.loads(metadata["checksums"])
        count = len(json.loads(metadata["layer_checksums"]))
        layered = sorted(each for name, each in ranges.items() if name not in whole)
        _check_order([each for name, each in ranges.items() if name in whole], layered, count)
        layers = tuple(
            tuple(
                (begin + (end - begin) // count * i, begin + (end - begin) // count * (i + 1))
                for begin, end in layered
            )
            for i in range(count)
        )
        return LayerRanges(layered[-1][1], layered[0][0], layers)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"{where} is no entry of KV ({error!r})") from error


def _check_order(whole: Sequence[ByteRange], layered: Sequence[ByteRange], count: int) -> None:
    """Raise ValueError unless tensors of `count` layers, in ascending order, fill all bytes after the others."""
    begins, ends = [begin for begin, _ in layered], [end for _, end in layered]
    if not count or any((end - begin) % count for begin, end in layered):
        raise ValueError(f"{count} layers do not divide what there is")
    if begins[1:] != ends[:-1] or any(end > begins[0] for _, end in whole):
        raise ValueError("the layers are not at the end")
