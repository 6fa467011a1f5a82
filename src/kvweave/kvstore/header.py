"""The header of an entry file: what the file says about itself, and which tensor lies where in it.

Laid out as safetensors lays it out: 8 bytes of length, then JSON, then the tensors one behind the other, so that
any safetensors reader opens the file. Written here and not by safetensors' own writer, which copies the tensors and hides
which OSError stopped it; read here so that bytes from anywhere will do, not only those of a file. Knows nothing of what
the tensors mean.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import xxhash
from torch import Tensor

from kvweave.errors import DamagedEntry, StoreTooNew
from kvweave.kvstore.keys import FORMAT_VERSION
from kvweave.ops.quantise import QuantisedKV

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""What a file can hold, under safetensors' names."""

Place: TypeAlias = tuple[int, int]
"""Where something begins and ends in a file, in bytes."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
_LENGTH_BYTES = 8
_CHECKSUM = "checksum_header"
_UNKNOWN = "0" * 16  # what stands in the checksum's place while it is computed


def checksum(*parts: Any) -> str:
    """XXH3-64 of bytes given in parts, anything with the buffer interface; 16 hex digits."""
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """A flat view of the bytes of a contiguous CPU tensor; copies nothing."""
    return tensor.flatten().view(torch.uint8).numpy().data


def write_header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """The first bytes of a file of these tensors, up to the first one's data.

    Adds the format version, its check and a checksum to the metadata, and spaces so that what follows the first tensor
    starts at a multiple of 64 bytes. Behind that every tensor is aligned for its dtype if those of wider ones come first.
    """
    version = str(FORMAT_VERSION)
    described = {"format_version": version, "format_check": _version_check(version), **metadata}
    document: dict[str, Any] = {"__metadata__": described | {_CHECKSUM: _UNKNOWN}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        form = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        document[name] = form
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    first = next(iter(tensors.values())).nbytes
    text += b" " * (-(_LENGTH_BYTES + len(text) + first) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header.replace(_named(_UNKNOWN), _named(checksum(header)), 1)


def read_header(data: Tensor, where: object) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's metadata and its tensors as views of `data` (bytes,) uint8, which they keep; the header verified.

    Args:
        data: the whole file. What the tensors hold is not looked at.
        where: names the file in errors.

    Raises:
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, altered in its header, or of an older format version.
    """
    metadata, forms, places = _described(data, where)
    size = max(end for _, end in places.values())
    if data.numel() != size:
        raise DamagedEntry(f"{where} has {data.numel()} bytes instead of {size}")
    return metadata, {name: _tensor(data, form, places[name]) for name, form in forms.items()}


def read_places(beginning: Tensor, where: object) -> tuple[dict[str, str], dict[str, Place]]:
    """A file's metadata and where its tensors lie in it, by its first bytes (n,) uint8; the header verified.

    Raises:
        StoreTooNew: written by a newer format version.
        DamagedEntry: there is no whole, unaltered header in these bytes.
    """
    metadata, _, places = _described(beginning, where)
    return metadata, places


def _described(data: Tensor, where: object) -> tuple[dict[str, str], dict[str, Any], dict[str, Place]]:
    """The metadata, and of each tensor its form as the header has it, and its place in the file."""
    header_bytes, metadata, forms = _verified(data, where)
    try:
        return metadata, forms, {name: _place(header_bytes, form) for name, form in forms.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedEntry(f"{where} does not say where its tensors are ({error!r})") from error


def _place(header_bytes: int, form: Mapping[str, Any]) -> Place:
    begin, end = map(operator.index, form["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"a tensor from {begin} to {end}")
    return header_bytes + begin, header_bytes + end


def _verified(data: Tensor, where: object) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The header's size, the metadata, and of each tensor what is to say its dtype, shape and place behind the header."""
    try:
        header, document = _document(data)
        metadata: dict[str, str] = document.pop("__metadata__")
        version = metadata["format_version"]
        known = metadata["format_check"] == _version_check(version) and version.isdecimal()
        stated = metadata.get(_CHECKSUM, "")
        intact = checksum(header.replace(_named(stated), _named(_UNKNOWN), 1)) == stated
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"{where} is truncated or not an entry of this store ({error!r})") from error
    if not known:
        raise DamagedEntry(f"{where} is not an entry of this store, or its version is damaged")
    _check_version(int(version), where)
    if not intact:
        raise DamagedEntry(f"{where} has an altered header")
    return len(header), metadata, document


def _document(data: Tensor) -> tuple[bytes, dict[str, Any]]:
    length = int.from_bytes(as_bytes(data[:_LENGTH_BYTES]), "little")
    if not 0 < length <= data.numel() - _LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes in a file of {data.numel()}")
    header = bytes(as_bytes(data[: _LENGTH_BYTES + length]))
    document = json.loads(header[_LENGTH_BYTES:].decode("ascii"))
    return header, dict(document)


def _check_version(version: int, where: object) -> None:
    if version > FORMAT_VERSION:
        raise StoreTooNew(
            f"{where} has format version {version}, this kvweave reads up to {FORMAT_VERSION}; upgrade kvweave"
        )
    if version < FORMAT_VERSION:
        raise DamagedEntry(
            f"{where} has format version {version}, which is not read any more; it will be computed again"
        )


def _tensor(data: Tensor, form: dict[str, Any], place: Place) -> Tensor:
    return data[slice(*place)].view(_BY_NAME[form["dtype"]]).reshape(form["shape"])


def _version_check(version: str) -> str:
    return checksum(f"kvweave/{version}".encode())


def _named(value: str) -> bytes:
    return f'"{_CHECKSUM}":"{value}"'.encode()


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
    """Gives out verified layers only; see `kvweave.types.KVLayers`. Safe to use from several threads.

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
