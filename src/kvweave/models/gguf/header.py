"""What a GGUF file says of itself: its metadata, and where each tensor lies. Reads no tensor data.

The format: github.com/ggml-org/ggml, docs/gguf.md. The package `gguf` has a reader of its own, but it makes several arrays
of each string: half a minute for a vocabulary of 262,144 words, against half a second here.
"""

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvweave.errors import ModelNotFound, UnsupportedModel

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_MAX_DEPTH: Final = 2
_MAX_AXES: Final = 4
_NUMBERS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_PART: Final = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its shape as torch orders it, its ggml type (a number), and its bytes, mapped from the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a model and its tensors, over all parts of a split file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value that belongs to the architecture: `attention.head_count` is `llama.attention.head_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, of which `path` is one: `name-00001-of-00003.gguf` has two more beside it.

    Raises ModelNotFound, naming the parts that are not there.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    suffix = path.name[-len(".gguf") :]
    names = [f"{match['prefix']}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        missing[3:] = [f"{len(missing) - 3} more"] if len(missing) > 3 else []
        raise ModelNotFound(
            f"{path} is one of {count} parts of a model, and {', '.join(missing)} {_is(missing)} not beside it; put "
            "all parts into one folder"
        )
    return [path.parent / name for name in names]


def first_parts(names: Sequence[str]) -> list[str]:
    """Return the names without the second and later parts of split models."""
    matches = {name: _PART.fullmatch(name) for name in names}
    return [name for name, match in matches.items() if match is None or int(match["number"]) == 1]


def siblings(name: str, names: Sequence[str]) -> list[str]:
    """Return those of `names` that are parts of the model that begins with `name`; that one alone if it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    same = (match["prefix"], match["count"])
    found = ((other, _PART.fullmatch(other)) for other in names)
    return [other for other, part in found if part and (part["prefix"], part["count"]) == same]


def read_header(parts: Sequence[Path]) -> Header:
    """Read what the files of one model say.

    Raises:
        ModelNotFound: a file is not GGUF, is cut off, or is a part of a model without the others.
        UnsupportedModel: a version of the format, or a type of tensor, that is not known.
    """
    read = [_Reader(path).read() for path in parts]
    first = read[0]
    count = first.metadata.get("split.count", 1) or 1
    tensors = tuple(tensor for part in read for tensor in part.tensors)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if not isinstance(count, int) or not isinstance(expected, int):
        raise ModelNotFound(
            f"{parts[0]} is damaged: its numbers of parts and tensors are none; download it again"
        )
    if count != len(parts):
        raise ModelNotFound(
            f"{parts[0]} is one of {count} parts of a model, but {len(parts)} {_is(parts)} given; name the parts "
            f"…-00001-of-{count:05}.gguf and so on, in one folder"
        )
    if expected != len(tensors):
        raise ModelNotFound(
            f"{parts[0]} should have {expected} tensors in its {count} parts, but they have {len(tensors)}; download "
            "them again"
        )
    return Header(parts[0], first.metadata, tensors)


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _is(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"


class _Reader:
    """Reads one file from its beginning; `_at` is the position in bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                # The map lives as long as the tensors that point into it.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error

    def read(self) -> Header:
        try:
            return self._header()
        except (struct.error, IndexError, OverflowError) as error:
            raise self._cut_off() from error
        except UnicodeDecodeError as error:
            raise self._damaged("a name in it is no text") from error

    def _header(self) -> Header:
        if self._data[: len(MAGIC)] != MAGIC:
            raise ModelNotFound(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF")
        self._at = len(MAGIC)
        version = self._number("<u4")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._path} is GGUF version {version & 0xFFFF or version}, or for machines of the other byte order; "
                f"kvweave reads versions {' and '.join(map(str, _VERSIONS))}, little-endian"
            )
        tensors, values = self._number("<u8"), self._number("<u8")
        metadata = {}
        for _ in range(values):
            name = self._string()
            metadata[name] = self._value(self._number("<u4"))
        entries = [self._entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32) or 32
        if not isinstance(alignment, int) or alignment < 0:
            raise self._damaged(f"its alignment is {str(alignment)[:50]!r}")
        begin = -(-self._at // alignment) * alignment
        found = tuple(self._tensor(begin, *entry) for entry in entries)
        return Header(self._path, metadata, found)

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: str, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(kind)
        start, self._at = self._at, self._at + count * dtype.itemsize
        if self._at > len(self._data):
            raise IndexError
        return np.frombuffer(self._data, dtype, count, start)

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at].decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return _plain(self._numbers(_NUMBERS[kind], 1))[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise UnsupportedModel(f"{self._path} has metadata of type {kind}, which GGUF does not define")
        if depth > _MAX_DEPTH:
            raise self._damaged("it has lists in lists")
        element, count = self._number("<u4"), self._number("<u8")
        if element in _NUMBERS:
            return _plain(self._numbers(_NUMBERS[element], count))
        return [self._value(element, depth + 1) for _ in range(count)]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("<u4")
        if axes > _MAX_AXES:
            raise self._damaged(f"a tensor in it has {axes} axes, but ggml has at most {_MAX_AXES}")
        shape = _plain(self._numbers("<u8", axes))
        return name, tuple(reversed(shape)), self._number("<u4"), self._number("<u8")

    def _tensor(
        self, begin: int, name: str, shape: tuple[int, ...], ggml_type: int, offset: int
    ) -> TensorEntry:
        start = begin + offset
        end = start + self._tensor_bytes(name, shape, ggml_type)
        if end > len(self._data):
            raise self._cut_off(end)
        return TensorEntry(name, shape, ggml_type, np.frombuffer(self._data, np.uint8, end - start, start))

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], ggml_type: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(
                f"{self._path} has tensors of ggml type {ggml_type} ({name}), which kvweave cannot read; take a file with "
                "another quantisation, such as Q4_K_M or Q8_0"
            ) from error
        return int(prod(shape) // block * block_bytes)

    def _damaged(self, why: str) -> ModelNotFound:
        return ModelNotFound(f"{self._path} is damaged: {why}; download it again")

    def _cut_off(self, needed: int | None = None) -> ModelNotFound:
        wanted = f" of at least {needed:,}" if needed else ""
        return ModelNotFound(
            f"{self._path} is cut off: it has {len(self._data):,} bytes{wanted}; download or copy it again"
        )


def _plain(numbers: npt.NDArray[Any]) -> list[Any]:
    """Return numbers as Python's; a 32-bit one as the shortest decimal that means it: 1e-06, not 9.999999974752427e-07."""
    if numbers.dtype == np.dtype("<f4") and len(numbers) < 1000:  # not the scores of a vocabulary
        return [float(str(number)) for number in numbers]
    values: list[Any] = numbers.tolist()
    return values
