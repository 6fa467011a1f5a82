"""The entry file: one safetensors file per entry, every bit of it under a checksum; docs/reference/file-format.md shows the layout.

A file holds a chunk's KV (`kv`, or `codes` and more for quantised KV, see `ops/quantise.py`) or the tensors of a feature. Opening
a file verifies all small parts. KV is verified layer by layer when a layer is first used. The queries that earlier versions could
store with KV are not read. Knows nothing about folders, tables or limits.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, get_args

import torch
from torch import Tensor

from kvweave.errors import DamagedEntry, InvalidRequest
from kvweave.kvstore.header import DTYPES, as_bytes, checksum, read_header, write_header
from kvweave.kvstore.keys import ContentKind, EntryKey, digest_token_bytes, has_queries, quantised
from kvweave.kvstore.layers import LayerStream, VerifiedLayers
from kvweave.ops.quantise import QuantisedKV, all_finite
from kvweave.types import STORAGES, ChunkFeature, ChunkKV, KVProvenance, Storage

Content = ChunkKV | ChunkFeature
"""What an entry holds."""

OnDamage = Callable[[str], object]
"""Called with the reason, in the thread that read a damaged layer, before DamagedEntry is raised."""

_CONTENTS: Mapping[str, ContentKind] = {name: name for name in get_args(ContentKind)}
_IDS = "token_ids"
_KV = "kv"
_QUERIES = "queries"
_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEATURE_TENSOR = re.compile(rf"(?!({_IDS}|{_KV})$)[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ParsedEntry:
    """An entry read from the bytes `data` (n,) uint8 of its file; all its tensors, token ids aside, are views of them."""

    key: EntryKey
    model_name: str
    sources: tuple[str, ...]
    content: Content
    data: Tensor

    @property
    def bytes(self) -> int:
        return self.data.numel()


# Writing


def encode_entry(
    key: EntryKey, model_name: str, content: Content, sources: Sequence[str]
) -> list[bytes | memoryview]:
    """Return the parts of an entry file, in the order of the file: views of the caller's tensors, nothing copied.

    Args:
        key: the entry's key; `key.tokens` must be the digest of the content's ids, `key.content` its kind.
        model_name: for people.
        content: KV of shape (L, 2, G, S, D), float32, bfloat16 or float16, or such KV quantised; or a feature.
            Tensors on another device or not contiguous are copied.
        sources: token digests of the chunks that it was made from.

    Raises:
        InvalidRequest: a shape, dtype or tensor name that cannot be stored; quantised KV whose provenance does not say
            so.
    """
    plain, layered, storage = _tensors(content, key)
    ids = torch.tensor(content.token_ids, dtype=torch.int64)
    whole = {_IDS: ids, **plain}
    # Over each layer's part of every tensor, in the order of the file.
    layer_checksums = [checksum(*map(as_bytes, parts)) for parts in zip(*layered.values(), strict=True)]
    metadata = {
        "content": key.content,
        "storage": storage,
        "key": key.digest,
        "namespace": key.namespace,
        "model_digest": key.model,
        "kind": key.provenance.kind,
        "exact": "true" if key.provenance.exact else "false",
        "rope_regime": key.provenance.rope_regime,
        "context": json.dumps(key.provenance.context),
        "model_name": model_name,
        "sources": json.dumps(list(sources)),
        "checksums": json.dumps({name: checksum(as_bytes(tensor)) for name, tensor in whole.items()}),
        "layer_checksums": json.dumps(layer_checksums),
    }
    tensors = {**whole, **layered}
    return [write_header(metadata, tensors), *map(as_bytes, tensors.values())]


def storage_of(kv: ChunkKV) -> Storage:
    """Return how KV is held: as the model computed it, or in fewer bits."""
    held = kv.data.held if isinstance(kv.data, VerifiedLayers) else kv.data
    return held.storage if isinstance(held, QuantisedKV) else "exact"


# Reading


def open_entry(path: Path, on_damage: OnDamage = lambda reason: None) -> ParsedEntry:
    """Map the entry at `path`: nothing is copied, and the mapping outlives the file's deletion.

    Args:
        path: the file; the kernel is asked to read all of it ahead.
        on_damage: called if a layer of KV turns out to be damaged later on.

    Returns:
        The entry: a feature verified, KV to be verified layer by layer as the layers are used. The mapping is private,
        so a stray write would not reach the file. Callers must not write to it anyway.

    Raises:
        FileNotFoundError: no such file.
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, of an older format version, or altered in a part that is verified at once.
        OSError: it cannot be opened.
    """
    return parse_entry(_map_file(path), path, on_damage)


def parse_entry(
    data: Tensor,
    where: object,
    on_damage: OnDamage = lambda reason: None,
    stream: LayerStream | None = None,
) -> ParsedEntry:
    """Parse the entry in the bytes (n,) uint8 of a file; otherwise as `open_entry`.

    Args:
        data: in memory or mapped. If they do not begin at a multiple of 64, the tensors are not aligned.
        where: names their source in errors.
        on_damage: see `open_entry`.
        stream: delivers the layers that are not in `data` yet; everything before the first layer is.
    """
    try:
        metadata, tensors = read_header(data, where)
        return _parsed(data, where, metadata, tensors, on_damage, stream)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        # The header's checksum holds, but another program may have written it.
        raise DamagedEntry(f"{where} has a header that cannot be understood ({error!r})") from error


def check_entry(entry: ParsedEntry, key: str, token_ids: Sequence[int] | None, where: object) -> None:
    """Raise DamagedEntry unless the entry has the key of this digest and these tokens; None if only the key is known."""
    if entry.key.digest != key:
        raise DamagedEntry(f"{where} holds entry {entry.key.digest}, not {key}")
    if token_ids is not None and entry.content.token_ids != tuple(token_ids):
        raise DamagedEntry(f"{where} belongs to other tokens than those asked for")


def verify_content(content: Content) -> None:
    """Check every layer that has not been checked so far; raise DamagedEntry."""
    if isinstance(content, ChunkKV) and isinstance(content.data, VerifiedLayers):
        content.data.verify()


def is_finite(content: Content) -> bool:
    """Return whether an entry has neither NaN nor infinity; of KV that was read, layers not verified yet are included."""
    if isinstance(content, ChunkFeature):
        tensors = list(content.tensors.values())
    else:
        held = content.data.held if isinstance(content.data, VerifiedLayers) else content.data
        tensors = list(held.tensors().values()) if isinstance(held, QuantisedKV) else [content.kv]
    return all(all_finite(tensor) for tensor in tensors if tensor.is_floating_point())


def _map_file(path: Path) -> Tensor:
    """Map the file's bytes (n,) uint8 and start reading ahead."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise DamagedEntry(f"{path} is empty")
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:  # torch opens the file again, by its name
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone") from error
        raise OSError(f"{path} cannot be mapped ({error})") from error
    finally:
        os.close(descriptor)


def _parsed(
    data: Tensor,
    where: object,
    metadata: dict[str, str],
    tensors: dict[str, Tensor],
    on_damage: OnDamage,
    stream: LayerStream | None,
) -> ParsedEntry:
    for name, stated in json.loads(metadata["checksums"]).items():
        if checksum(as_bytes(tensors[name])) != stated:
            raise DamagedEntry(f"{where} is altered in {name}")
    ids = tensors.pop(_IDS)
    key = _key(metadata, digest_token_bytes(ids.numpy().data))
    if key.digest != metadata["key"]:
        raise DamagedEntry(f"{where} names itself {metadata['key']} but is made as {key.digest}")
    token_ids = tuple(ids.tolist())
    content: Content
    if key.content == "note":
        content = ChunkFeature(token_ids, MappingProxyType(tensors))
    else:

        def refuse(layer: int) -> NoReturn:
            reason = f"{where} is altered in layer {layer}"
            on_damage(reason)
            raise DamagedEntry(reason)

        if has_queries(key.provenance):
            del tensors[_QUERIES]
        storage = STORAGES[metadata["storage"]]
        held = tensors[_KV] if storage == "exact" else QuantisedKV(storage=storage, **tensors)
        checksums = json.loads(metadata["layer_checksums"])
        content = ChunkKV(token_ids, VerifiedLayers(held, list(tensors.values()), checksums, refuse, stream))
    return ParsedEntry(key, metadata["model_name"], tuple(json.loads(metadata["sources"])), content, data)


# The metadata


def _key(metadata: Mapping[str, str], tokens: str) -> EntryKey:
    provenance = KVProvenance(
        kind=metadata["kind"],
        context=tuple(json.loads(metadata["context"])),
        exact=metadata["exact"] == "true",
        rope_regime=metadata["rope_regime"],
    )
    content = _CONTENTS[metadata["content"]]
    return EntryKey(metadata["namespace"], metadata["model_digest"], tokens, provenance, content)


# The tensors, checked, on the CPU, contiguous and in the order of the file


def _tensors(content: Content, key: EntryKey) -> tuple[dict[str, Tensor], dict[str, Tensor], Storage]:
    """Return the tensors that are verified whole, those that are verified layer by layer, and the storage."""
    if isinstance(content, ChunkFeature):
        _check_feature(content)
        return _ordered(content.tensors), {}, "exact"
    storage = storage_of(content)
    _check_kv(content, storage, key.provenance)
    held = content.data
    if isinstance(held, VerifiedLayers):
        held = held.verified()
    return {}, _ordered(held.tensors() if isinstance(held, QuantisedKV) else {_KV: content.kv}), storage


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with wider dtypes first, so that each of them is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in ordered}


def _check_kv(chunk: ChunkKV, storage: Storage, provenance: KVProvenance) -> None:
    shape = tuple(chunk.data.shape)
    if len(shape) != 5 or shape[1] != 2 or shape[3] != chunk.tokens:
        raise InvalidRequest(
            f"kv has shape {shape}; with {chunk.tokens} token ids it must be (L, 2, G, {chunk.tokens}, D)"
        )
    if chunk.data.dtype not in _KV_DTYPES:
        raise InvalidRequest(f"kv has dtype {chunk.data.dtype}; float32, bfloat16 or float16 can be stored")
    if quantised(provenance, storage) != provenance:
        raise InvalidRequest(
            f"kv is stored as {storage}, its provenance is {provenance.kind}, exact {provenance.exact}; quantised KV is "
            "never exact, and its kind names the storage, such as isolated-int8"
        )


def _check_feature(feature: ChunkFeature) -> None:
    for name, tensor in feature.tensors.items():
        if not _FEATURE_TENSOR.fullmatch(name):
            raise InvalidRequest(
                f"a feature's tensor is named {name!r}; write a word of lower-case letters, digits and underscores "
                f"that begins with a letter and is neither {_KV} nor {_IDS}"
            )
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InvalidRequest(f"{name} has dtype {tensor.dtype}; a feature may hold {known}")
