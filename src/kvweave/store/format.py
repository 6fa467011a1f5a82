"""The entry file: one safetensors file per entry, every bit of it under a checksum.

Layout, version 1. An ordinary safetensors file (8 bytes header length, JSON header, data) with two tensors,
`token_ids` (S,) int64 and `kv` (L, 2, G, S, D) in the model's dtype with keys before rotation, in this order;
the header is padded with spaces so that `kv` starts at a multiple of 64 bytes. String metadata:

    format_version    "1"
    format_check      XXH3-64 of "kvweave/<format_version>", the same in all versions to come: a flipped bit in
                      the version is damage, not a newer version
    key               EntryKey.digest
    namespace, model_digest, kind, exact ("true"/"false"), rope_regime, context (JSON list)
                      what the key is made of; the token digest follows from `token_ids`
    model_name        for people
    sources           JSON list of the token digests of the chunks it was made from
    checksum_layers   L XXH3-64, 16 hex digits each, one per layer's bytes, separated by spaces
    checksum_tokens   XXH3-64 of the bytes of `token_ids`
    checksum_header   XXH3-64 of the JSON of all other metadata, sorted, with the dtype and shape of both tensors

The header is written here and not by safetensors' own writer, which copies the tensors and hides which
OSError stopped it; safetensors reads it. Knows nothing about folders, tables or limits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvweave.core import ChunkKV, Making
from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.store.atomic_file import write_atomically
from kvweave.store.keys import FORMAT_VERSION, EntryKey, digest_token_bytes, token_bytes

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
_KINDS = ("bare", "isolated", "observed")


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """A file's content before it is written: views of the caller's tensors, nothing copied.

    `parts` are written one after the other; `bytes` is the file's size.
    """

    parts: tuple[bytes | memoryview, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file's verified content; `chunk.kv` is a view of the mapped file."""

    key: EntryKey
    model_name: str
    sources: tuple[str, ...]
    chunk: ChunkKV


def encode_entry(key: EntryKey, model_name: str, chunk: ChunkKV, sources: Sequence[str]) -> EncodedEntry:
    """Lay out one entry.

    Args:
        key: its name; `key.tokens` must be the digest of the chunk's ids.
        model_name: for people.
        chunk: kv of shape (L, 2, G, S, D), float32, bfloat16 or float16; on another device or not contiguous,
            it is copied.
        sources: token digests of the chunks it was made from.

    Raises:
        InvalidRequest: a shape or dtype that cannot be stored.
    """
    _check(chunk)
    ids = token_bytes(chunk.token_ids)
    layers = _layer_bytes(chunk.kv.detach().to("cpu").contiguous())
    tensors = {
        "token_ids": ("I64", [chunk.tokens]),
        "kv": (_DTYPE_NAMES[chunk.kv.dtype], list(chunk.kv.shape)),
    }
    metadata = _describe(key, model_name, sources)
    metadata["checksum_layers"] = " ".join(map(_checksum, layers))
    metadata["checksum_tokens"] = _checksum(ids)
    metadata["checksum_header"] = _header_checksum(metadata, tensors)
    header = _header(metadata, tensors, len(ids), chunk.bytes)
    parts: tuple[bytes | memoryview, ...] = (len(header).to_bytes(8, "little"), header, ids, *layers)
    return EncodedEntry(parts, 8 + len(header) + len(ids) + chunk.bytes)


def write_entry(path: Path, entry: EncodedEntry) -> None:
    """Write an encoded entry to `path`: whole, on the disk, or not at all (see `write_atomically`).

    Raises:
        OSError: the file system's own error; nothing is left behind.
    """
    write_atomically(path, entry.parts)


def read_entry(path: Path, key: EntryKey, token_ids: Sequence[int]) -> ChunkKV:
    """Map the entry that is expected at `path`, after checking every bit of it.

    Returns:
        kv as a view of the mapped file: no copy, valid for as long as it is referenced even when the file is
        deleted. The mapping is private, so a stray write would not reach the file; still, nobody writes to it.

    Raises:
        FileNotFoundError: no such file.
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, altered, or not the entry that was asked for.
    """
    stored = open_entry(path)
    if stored.key.digest != key.digest:
        raise DamagedEntry(f"{path} holds entry {stored.key.digest}, not {key.digest}")
    if stored.chunk.token_ids != tuple(token_ids):
        raise DamagedEntry(f"{path} holds the KV of other tokens than those asked for")
    return stored.chunk


def open_entry(path: Path) -> StoredEntry:
    """Map whatever entry is at `path`, after checking every bit of it; raises as `read_entry` does."""
    metadata, token_ids, kv = _map_file(path)
    _check_version(path, metadata)
    try:
        return _verified(path, metadata, token_ids, kv)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        # Nothing in a damaged header can be relied upon: whatever it trips over is damage.
        raise DamagedEntry(f"{path} has a header that cannot be read ({error!r})") from error


def _map_file(path: Path) -> tuple[dict[str, str], torch.Tensor, torch.Tensor]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if sorted(file.keys()) != ["kv", "token_ids"]:
                raise DamagedEntry(f"{path} is not a chunk-KV entry: it holds {sorted(file.keys())}")
            return metadata, file.get_tensor("token_ids"), file.get_tensor("kv")
    except FileNotFoundError as error:
        if path.exists():  # safetensors says so of every file it cannot open, also for lack of descriptors
            raise OSError(f"{path} cannot be opened ({error})") from error
        raise
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedEntry(f"{path} is truncated or not a safetensors file ({error})") from error


def _check_version(path: Path, metadata: dict[str, str]) -> None:
    version = metadata.get("format_version", "")
    if metadata.get("format_check") != _checksum(f"kvweave/{version}".encode()) or not version.isdecimal():
        raise DamagedEntry(f"{path} is not a chunk-KV entry, or its version is damaged")
    if int(version) > FORMAT_VERSION:
        raise StoreTooNew(
            f"{path} has format version {version}, this kvweave reads up to {FORMAT_VERSION}; upgrade kvweave"
        )


def _verified(path: Path, metadata: dict[str, str], ids: torch.Tensor, kv: torch.Tensor) -> StoredEntry:
    if ids.dtype != torch.int64 or kv.dtype not in _DTYPE_NAMES:
        raise DamagedEntry(f"{path} has tensors of dtype {ids.dtype} and {kv.dtype}")
    tensors = {"token_ids": ("I64", list(ids.shape)), "kv": (_DTYPE_NAMES[kv.dtype], list(kv.shape))}
    stated = metadata.pop("checksum_header")
    if stated != _header_checksum(metadata, tensors):
        raise DamagedEntry(f"{path} has an altered header")
    id_bytes = ids.numpy().data
    if metadata["checksum_tokens"] != _checksum(id_bytes):
        raise DamagedEntry(f"{path} has altered token ids")
    for layer, (stated, data) in enumerate(
        zip(metadata["checksum_layers"].split(), _layer_bytes(kv), strict=True)
    ):
        if stated != _checksum(data):
            raise DamagedEntry(f"{path} is altered in layer {layer}")
    key = _key(metadata, digest_token_bytes(id_bytes))
    if key.digest != metadata["key"]:
        raise DamagedEntry(f"{path} names itself {metadata['key']} but is made as {key.digest}")
    chunk = ChunkKV(tuple(ids.tolist()), kv)
    return StoredEntry(key, metadata["model_name"], tuple(json.loads(metadata["sources"])), chunk)


def _key(metadata: dict[str, str], tokens: str) -> EntryKey:
    kind = metadata["kind"]
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    making = Making(
        kind=kind,  # type: ignore[arg-type]  # checked above
        context=tuple(json.loads(metadata["context"])),
        exact=metadata["exact"] == "true",
        rope_regime=metadata["rope_regime"],
    )
    return EntryKey(metadata["namespace"], metadata["model_digest"], tokens, making)


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


def _header(metadata: dict[str, str], tensors: dict[str, Any], ids_bytes: int, kv_bytes: int) -> bytes:
    offsets = {"token_ids": [0, ids_bytes], "kv": [ids_bytes, ids_bytes + kv_bytes]}
    document: dict[str, Any] = {"__metadata__": metadata}
    for name, (dtype, shape) in tensors.items():
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets[name]}
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    return text + b" " * (-(8 + len(text) + ids_bytes) % _ALIGNMENT)


def _header_checksum(metadata: dict[str, str], tensors: dict[str, Any]) -> str:
    return _checksum(json.dumps([metadata, tensors], sort_keys=True).encode("ascii"))


def _checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _layer_bytes(kv: torch.Tensor) -> list[memoryview]:
    """One flat view of the bytes of each of the L layers of a contiguous CPU tensor."""
    return [layer.flatten().view(torch.uint8).numpy().data for layer in kv]  # (L, 2, G, S, D) → L of (bytes,)


def _check(chunk: ChunkKV) -> None:
    shape = tuple(chunk.kv.shape)
    if len(shape) != 5 or shape[1] != 2 or shape[3] != chunk.tokens:
        raise InvalidRequest(
            f"kv has shape {shape}; with {chunk.tokens} token ids it must be (L, 2, G, {chunk.tokens}, D)"
        )
    if chunk.kv.dtype not in _DTYPE_NAMES:
        raise InvalidRequest(f"kv has dtype {chunk.kv.dtype}; float32, bfloat16 or float16 can be stored")
