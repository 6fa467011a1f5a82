"""The header of an entry file: what the file says about itself, and which bytes hold which tensor.

The layout is that of safetensors: 8 bytes of length, then JSON, then the tensors one after the other. Any safetensors
reader opens the file. safetensors' own writer is not used: it copies the tensors and hides which OSError stopped it.
Reading accepts bytes from anywhere, not only from a file. Knows nothing of what the tensors mean.
"""

import json
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from kvweave.errors import DamagedEntry, StoreTooNew
from kvweave.kvstore.keys import FORMAT_VERSION

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""The dtypes that a file can hold, with safetensors' names for them."""

ByteRange: TypeAlias = tuple[int, int]
"""A part of an entry's bytes: begin inclusive, end exclusive."""

_DTYPE_NAMED = {name: dtype for dtype, name in DTYPES.items()}
_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
_LENGTH_BYTES = 8
_CHECKSUM = "checksum_header"
_PLACEHOLDER = "0" * 16  # in the checksum's place while it is computed


def checksum(*parts: Any) -> str:
    """Return the XXH3-64 of bytes given in parts, anything with the buffer interface; 16 hex digits."""
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a flat view of the bytes of a contiguous CPU tensor; copies nothing."""
    return tensor.flatten().view(torch.uint8).numpy().data


def write_header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the first bytes of a file of these tensors, up to the data of the first tensor.

    Adds the format version, its check and a checksum to the metadata. Pads with spaces so that the data after the first
    tensor starts at a multiple of 64 bytes. Every later tensor is aligned for its dtype if wider dtypes come first.
    """
    version = str(FORMAT_VERSION)
    described = {"format_version": version, "format_check": _version_check(version), **metadata}
    document: dict[str, Any] = {"__metadata__": described | {_CHECKSUM: _PLACEHOLDER}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        form = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        document[name] = form
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    first = next(iter(tensors.values())).nbytes
    text += b" " * (-(_LENGTH_BYTES + len(text) + first) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header.replace(_checksum_item(_PLACEHOLDER), _checksum_item(checksum(header)), 1)


def read_header(data: Tensor, where: object) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Verify a file's header and return its metadata and its tensors, which are views of `data`.

    Args:
        data: the bytes (n,) uint8 of the whole file. The tensors' contents are not verified.
        where: names the file in errors.

    Raises:
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, altered in its header, or of an older format version.
    """
    metadata, forms, ranges = parse_header(data, where)
    size = max(end for _, end in ranges.values())
    if data.numel() != size:
        raise DamagedEntry(f"{where} has {data.numel()} bytes instead of {size}")
    return metadata, {
        name: data[slice(*ranges[name])].view(_DTYPE_NAMED[form["dtype"]]).reshape(form["shape"])
        for name, form in forms.items()
    }


def parse_header(data: Tensor, where: object) -> tuple[dict[str, str], dict[str, Any], dict[str, ByteRange]]:
    """Verify the header in a file's first bytes (n,) uint8.

    Returns:
        The metadata, and for each tensor its form (dtype, shape, offsets) and its byte range.

    Raises as `read_header`.
    """
    try:
        header, forms = _document(data)
        metadata: dict[str, str] = forms.pop("__metadata__")
        version = metadata["format_version"]
        known = metadata["format_check"] == _version_check(version) and version.isdecimal()
        stated = metadata.get(_CHECKSUM, "")
        intact = checksum(header.replace(_checksum_item(stated), _checksum_item(_PLACEHOLDER), 1)) == stated
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"{where} is truncated or not an entry of this store ({error!r})") from error
    if not known:
        raise DamagedEntry(f"{where} is not an entry of this store, or its version is damaged")
    if int(version) > FORMAT_VERSION:
        raise StoreTooNew(
            f"{where} has format version {version}, this kvweave reads up to {FORMAT_VERSION}; upgrade kvweave"
        )
    if int(version) < FORMAT_VERSION:
        raise DamagedEntry(
            f"{where} has format version {version}, which is not read any more; it will be computed again"
        )
    if not intact:
        raise DamagedEntry(f"{where} has an altered header")
    try:
        return metadata, forms, {name: _range(len(header), form) for name, form in forms.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedEntry(f"{where} does not say where its tensors are ({error!r})") from error


def _document(data: Tensor) -> tuple[bytes, dict[str, Any]]:
    length = int.from_bytes(as_bytes(data[:_LENGTH_BYTES]), "little")
    if not 0 < length <= data.numel() - _LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes in a file of {data.numel()}")
    header = bytes(as_bytes(data[: _LENGTH_BYTES + length]))
    return header, dict(json.loads(header[_LENGTH_BYTES:].decode("ascii")))


def _range(header_bytes: int, form: Mapping[str, Any]) -> ByteRange:
    begin, end = map(operator.index, form["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"a tensor from {begin} to {end}")
    return header_bytes + begin, header_bytes + end


def _version_check(version: str) -> str:
    return checksum(f"kvweave/{version}".encode())


def _checksum_item(value: str) -> bytes:
    return f'"{_CHECKSUM}":"{value}"'.encode()
