"""The entry file: one safetensors file per entry, every bit of it under a checksum.

Layout, version 1. An ordinary safetensors file (8 bytes header length, JSON header, data) that begins with
the tensor `token_ids` (S,) int64. A chunk-KV entry has one more, `kv` (L, 2, G, S, D) in the model's dtype with
keys before rotation; a note has any number, of other names, the widest dtypes first so that each is aligned.
The header is padded with spaces so that what follows `token_ids` starts at a multiple of 64 bytes. String
metadata:

    format_version    "1"
    format_check      XXH3-64 of "kvweave/<format_version>", the same in all versions to come: a flipped bit in
                      the version is damage, not a newer version
    key               EntryKey.digest
    namespace, model_digest, kind, exact ("true"/"false"), rope_regime, context (JSON list)
                      what the key is made of; the token digest follows from `token_ids`, and whether it is a
                      note from the tensors' names
    model_name        for people
    sources           JSON list of the token digests of the chunks it was made from
    checksums         JSON object: for each tensor the XXH3-64 of its bytes, 16 hex digits, in a list; for `kv`
                      L of them, one per layer
    checksum_header   XXH3-64 of the JSON of all other metadata, sorted, with dtype and shape of every tensor

The header is written here and not by safetensors' own writer, which copies the tensors and hides which
OSError stopped it; safetensors reads it. Knows nothing about folders, tables or limits.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvweave.core import ChunkKV, ChunkNote, Making
from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.store.atomic_file import write_atomically
from kvweave.store.keys import FORMAT_VERSION, ContentKind, EntryKey, digest_token_bytes

Content = ChunkKV | ChunkNote
"""What an entry holds."""

_KV_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = _KV_DTYPES | {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8"}
_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
_IDS = "token_ids"
_KV = "kv"
_NOTE_TENSOR = re.compile(rf"(?!({_IDS}|{_KV})$)[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """A file's content before it is written: views of the caller's tensors, nothing copied.

    `parts` are written one after the other; `bytes` is the file's size.
    """

    parts: tuple[bytes | memoryview, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file's verified content; its tensors, token ids aside, are views of the mapped file."""

    key: EntryKey
    model_name: str
    sources: tuple[str, ...]
    content: Content


def encode_entry(key: EntryKey, model_name: str, content: Content, sources: Sequence[str]) -> EncodedEntry:
    """Lay out one entry.

    Args:
        key: its name; `key.tokens` must be the digest of the content's ids, `key.content` what it is.
        model_name: for people.
        content: kv of shape (L, 2, G, S, D), float32, bfloat16 or float16, or a note; a tensor on another
            device or not contiguous is copied.
        sources: token digests of the chunks it was made from.

    Raises:
        InvalidRequest: a shape, a dtype or a tensor's name that cannot be stored.
    """
    tensors = _tensors(content)
    blocks = {name: _blocks(name, tensor) for name, tensor in tensors.items()}
    metadata = _describe(key, model_name, sources)
    metadata["checksums"] = json.dumps(
        {name: [_checksum(part) for part in of_tensor] for name, of_tensor in blocks.items()}
    )
    metadata["checksum_header"] = _header_checksum(metadata, tensors)
    header = _header(metadata, tensors)
    data = [part for of_tensor in blocks.values() for part in of_tensor]
    parts: tuple[bytes | memoryview, ...] = (len(header).to_bytes(8, "little"), header, *data)
    return EncodedEntry(parts, sum(map(len, parts)))


def write_entry(path: Path, entry: EncodedEntry) -> None:
    """Write an encoded entry to `path`: whole, on the disk, or not at all (see `write_atomically`).

    Raises:
        OSError: the file system's own error; nothing is left behind.
    """
    write_atomically(path, entry.parts)


def read_entry(path: Path, key: EntryKey, token_ids: Sequence[int]) -> Content:
    """Map the entry that is expected at `path`, after checking every bit of it.

    Returns:
        What `key.content` says, its tensors as views of the mapped file: no copy, valid for as long as they
        are referenced even when the file is deleted. The mapping is private, so a stray write would not reach
        the file; still, nobody writes to it.

    Raises:
        FileNotFoundError: no such file.
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, altered, or not the entry that was asked for.
    """
    stored = open_entry(path)
    if stored.key.digest != key.digest:
        raise DamagedEntry(f"{path} holds entry {stored.key.digest}, not {key.digest}")
    if stored.content.token_ids != tuple(token_ids):
        raise DamagedEntry(f"{path} belongs to other tokens than those asked for")
    return stored.content


def open_entry(path: Path) -> StoredEntry:
    """Map whatever entry is at `path`, after checking every bit of it; raises as `read_entry` does."""
    metadata, tensors = _map_file(path)
    _check_version(path, metadata)
    try:
        return _verified(path, metadata, tensors)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        # Nothing in a damaged header can be relied upon: whatever it trips over is damage.
        raise DamagedEntry(f"{path} has a header that cannot be read ({error!r})") from error


def _map_file(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except FileNotFoundError as error:
        if path.exists():  # safetensors says so of every file it cannot open, also for lack of descriptors
            raise OSError(f"{path} cannot be opened ({error})") from error
        raise
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedEntry(f"{path} is truncated or not a safetensors file ({error})") from error


def _check_version(path: Path, metadata: dict[str, str]) -> None:
    version = metadata.get("format_version", "")
    if metadata.get("format_check") != _checksum(f"kvweave/{version}".encode()) or not version.isdecimal():
        raise DamagedEntry(f"{path} is not an entry of this store, or its version is damaged")
    if int(version) > FORMAT_VERSION:
        raise StoreTooNew(
            f"{path} has format version {version}, this kvweave reads up to {FORMAT_VERSION}; upgrade kvweave"
        )


def _verified(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> StoredEntry:
    stated = metadata.pop("checksum_header")
    if stated != _header_checksum(metadata, tensors):
        raise DamagedEntry(f"{path} has an altered header")
    checksums = json.loads(metadata["checksums"])
    for name, tensor in tensors.items():
        blocks = zip(checksums[name], _blocks(name, tensor), strict=True)
        for block, (stated, data) in enumerate(blocks):
            if stated != _checksum(data):
                raise DamagedEntry(f"{path} is altered in {f'layer {block}' if name == _KV else name}")
    ids = tensors.pop(_IDS)
    key = _key(metadata, digest_token_bytes(ids.numpy().data), tensors)
    if key.digest != metadata["key"]:
        raise DamagedEntry(f"{path} names itself {metadata['key']} but is made as {key.digest}")
    return StoredEntry(
        key,
        metadata["model_name"],
        tuple(json.loads(metadata["sources"])),
        _content(tuple(ids.tolist()), tensors),
    )


def _key(metadata: dict[str, str], tokens: str, tensors: Mapping[str, torch.Tensor]) -> EntryKey:
    making = Making(
        kind=metadata["kind"],
        context=tuple(json.loads(metadata["context"])),
        exact=metadata["exact"] == "true",
        rope_regime=metadata["rope_regime"],
    )
    content: ContentKind = "kv" if _KV in tensors else "note"
    return EntryKey(metadata["namespace"], metadata["model_digest"], tokens, making, content)


def _describe(key: EntryKey, model_name: str, sources: Sequence[str]) -> dict[str, str]:
    version = str(FORMAT_VERSION)
    return {
        "format_version": version,
        "format_check": _checksum(f"kvweave/{version}".encode()),
        "key": key.digest,
        "namespace": key.namespace,
        "model_digest": key.model,
        "kind": key.making.kind,
        "exact": "true" if key.making.exact else "false",
        "rope_regime": key.making.rope_regime,
        "context": json.dumps(key.making.context),
        "model_name": model_name,
        "sources": json.dumps(list(sources)),
    }


def _header(metadata: dict[str, str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    document: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in _form(tensors).items():
        start, end = end, end + tensors[name].nbytes
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    return text + b" " * (-(8 + len(text) + tensors[_IDS].nbytes) % _ALIGNMENT)


def _header_checksum(metadata: dict[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    return _checksum(json.dumps([metadata, _form(tensors)], sort_keys=True).encode("ascii"))


def _form(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (_DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


def _checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _blocks(name: str, tensor: torch.Tensor) -> list[memoryview]:
    """Flat views of the bytes of a contiguous CPU tensor, one for each checksum: each layer of `kv`, else all."""
    parts = tensor if name == _KV else [tensor]  # (L, 2, G, S, D) → L of (2, G, S, D)
    return [part.flatten().view(torch.uint8).numpy().data for part in parts]


def _content(token_ids: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> Content:
    if _KV in tensors:
        return ChunkKV(token_ids, tensors[_KV])
    return ChunkNote(token_ids, MappingProxyType(tensors))


def _tensors(content: Content) -> dict[str, torch.Tensor]:
    """What goes into the file, checked, on the CPU, contiguous and in order."""
    if isinstance(content, ChunkKV):
        _check_kv(content)
        named: Mapping[str, torch.Tensor] = {_KV: content.kv}
    else:
        _check_note(content)
        named = content.tensors
    ordered = sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0]))
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in ordered}
    return {_IDS: torch.tensor(content.token_ids, dtype=torch.int64)} | plain


def _check_kv(chunk: ChunkKV) -> None:
    shape = tuple(chunk.kv.shape)
    if len(shape) != 5 or shape[1] != 2 or shape[3] != chunk.tokens:
        raise InvalidRequest(
            f"kv has shape {shape}; with {chunk.tokens} token ids it must be (L, 2, G, {chunk.tokens}, D)"
        )
    if chunk.kv.dtype not in _KV_DTYPES:
        raise InvalidRequest(f"kv has dtype {chunk.kv.dtype}; float32, bfloat16 or float16 can be stored")


def _check_note(note: ChunkNote) -> None:
    for name, tensor in note.tensors.items():
        if not _NOTE_TENSOR.fullmatch(name):
            raise InvalidRequest(
                f"a note's tensor is named {name!r}; write a word of lower-case letters, digits and underscores "
                f"that begins with a letter and is neither {_KV} nor {_IDS}"
            )
        if tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise InvalidRequest(f"{name} has dtype {tensor.dtype}; a note may hold {known}")
