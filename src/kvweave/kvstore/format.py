"""The entry file: one safetensors file per entry, every bit of it under a checksum; see lab/docs/format.md for the layout.

A chunk's KV is in the file as it was computed (`kv`), with its tokens' queries beside it (`queries`) or without, or coded
in fewer bits (`codes` and what belongs to them, see `ops/quantise.py`), a note as the tensors that it has. What is little
is verified when the file is opened, KV and queries one layer at a time when it is first asked for. Knows nothing about
folders, tables or limits.
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
from kvweave.files import write_atomically
from kvweave.kvstore.header import (
    DTYPES,
    Coming,
    Place,
    VerifiedLayers,
    as_bytes,
    checksum,
    read_header,
    read_places,
    write_header,
)
from kvweave.kvstore.keys import ContentKind, EntryKey, digest_token_bytes, has_queries, quantised
from kvweave.ops.quantise import QuantisedKV
from kvweave.types import STORAGES, ChunkFeature, ChunkKV, KVProvenance, Storage

Content = ChunkKV | ChunkFeature
"""What an entry holds."""

_CONTENTS: Mapping[str, ContentKind] = {name: name for name in get_args(ContentKind)}
_IDS = "token_ids"
_KV = "kv"
_QUERIES = "queries"
_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOTE_TENSOR = re.compile(rf"(?!({_IDS}|{_KV})$)[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """A file's content before it is written: views of the caller's tensors, nothing copied.

    `parts` are written one after the other; `bytes` is the file's size.
    """

    parts: tuple[bytes | memoryview, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ParsedEntry:
    """A file's content; its tensors, token ids aside, are views of the file's bytes."""

    key: EntryKey
    model_name: str
    sources: tuple[str, ...]
    content: Content


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Where a file of KV has its layers: at its end, one tensor behind the other.

    `layers` says for each where it begins and ends, in every tensor that has layers; `first` is where the first of all begins:
    what lies before has to be there to make sense of the rest. `bytes` is the file's size.
    """

    bytes: int
    first: int
    layers: tuple[tuple[Place, ...], ...]


def verify_content(content: Content) -> None:
    """Check what has not been checked so far of what was read from a file; raises DamagedEntry."""
    for held in (content.held, content.queries) if isinstance(content, ChunkKV) else ():
        if isinstance(held, VerifiedLayers):
            held.verify()


def storage_of(kv: ChunkKV) -> Storage:
    """How KV is held: as it was computed, or in fewer bits."""
    held = kv.held.held if isinstance(kv.held, VerifiedLayers) else kv.held
    return held.storage if isinstance(held, QuantisedKV) else "exact"


def encode_entry(key: EntryKey, model_name: str, content: Content, sources: Sequence[str]) -> EncodedEntry:
    """Lay out one entry.

    Args:
        key: its name; `key.tokens` must be the digest of the content's ids, `key.content` what it is.
        model_name: for people.
        content: kv of shape (L, 2, G, S, D), float32, bfloat16 or float16, with queries (L, H, S, D) of that dtype or
            without, or such KV quantised, or a note; a tensor on another device or not contiguous is copied.
        sources: token digests of the chunks it was made from.

    Raises:
        InvalidRequest: a shape, a dtype or a tensor's name that cannot be stored; quantised KV, or KV with queries, under
            a making that does not say so.
    """
    plain, layered, storage = _tensors(content, key)
    queries = _queries(content)
    ids = torch.tensor(content.token_ids, dtype=torch.int64)
    whole = {_IDS: ids, **plain}
    metadata = {
        **_describe(key, model_name, sources, storage),
        "checksums": json.dumps({name: checksum(as_bytes(tensor)) for name, tensor in whole.items()}),
        "layer_checksums": json.dumps(_layer_checksums(layered)),
        **({"query_checksums": json.dumps(_layer_checksums(queries))} if queries else {}),
    }
    tensors = {**whole, **layered, **queries}
    data = [as_bytes(tensor) for tensor in tensors.values()]
    parts: tuple[bytes | memoryview, ...] = (write_header(metadata, tensors), *data)
    return EncodedEntry(parts, sum(map(len, parts)))


def write_entry(path: Path, entry: EncodedEntry) -> None:
    """Write an encoded entry to `path`: whole, on the disk, or not at all (see `write_atomically`).

    Raises:
        OSError: the file system's own error; nothing is left behind.
    """
    write_atomically(path, entry.parts)


def read_entry(
    path: Path,
    key: EntryKey,
    token_ids: Sequence[int],
    damaged: Callable[[str], object] = lambda reason: None,
) -> Content:
    """Map the entry that is expected at `path`: no copy, valid for as long as it is referenced, also when deleted.

    Args:
        path: the file; the kernel is asked to read all of it ahead.
        key: what it must hold.
        token_ids: what its tokens must be.
        damaged: called with the reason, in the thread that asked, before DamagedEntry is raised over a layer of KV
            later on.

    Returns:
        What `key.content` says: a note verified, KV verified one layer after the other when they are first asked for.
        The mapping is private, so a stray write would not reach the file; still, nobody writes to it.

    Raises:
        FileNotFoundError: no such file.
        StoreTooNew: written by a newer format version.
        DamagedEntry: truncated, foreign, of an older format version, altered in what was verified so far, or not the
            entry that was asked for.
        OSError: it cannot be opened.
    """
    return expected(open_entry(path, damaged), key, token_ids, path)


def expected(stored: ParsedEntry, key: EntryKey, token_ids: Sequence[int], where: object) -> Content:
    """The content of an entry if it is the one that was asked for; raises DamagedEntry."""
    if stored.key.digest != key.digest:
        raise DamagedEntry(f"{where} holds entry {stored.key.digest}, not {key.digest}")
    if stored.content.token_ids != tuple(token_ids):
        raise DamagedEntry(f"{where} belongs to other tokens than those asked for")
    return stored.content


def open_entry(path: Path, damaged: Callable[[str], object] = lambda reason: None) -> ParsedEntry:
    """Map whatever entry is at `path`; as `read_entry` in all else."""
    return parse_entry(_map_file(path), path, damaged)


def layer_places(beginning: Tensor, where: object) -> LayerPlaces:
    """Where the layers of an entry lie, by the first bytes (n,) uint8 of its file.

    Raises:
        StoreTooNew: of a newer format version.
        DamagedEntry: not all of the header is there, or it is altered, or that of a file whose layers are not at its end.
    """
    try:
        metadata, places = read_places(beginning, where)
        whole = json.loads(metadata["checksums"])
        count = len(json.loads(metadata["layer_checksums"]))
        layered = sorted(place for name, place in places.items() if name not in whole)
        _check_order([place for name, place in places.items() if name in whole], layered, count)
        layers = tuple(
            tuple(
                (begin + (end - begin) // count * i, begin + (end - begin) // count * (i + 1))
                for begin, end in layered
            )
            for i in range(count)
        )
        return LayerPlaces(layered[-1][1], layered[0][0], layers)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"{where} is no entry of KV ({error!r})") from error


def parse_entry(
    data: Tensor,
    where: object,
    damaged: Callable[[str], object] = lambda reason: None,
    coming: Coming | None = None,
) -> ParsedEntry:
    """The entry in the bytes (n,) uint8 of a file, which its tensors stay views of; as `read_entry` in all else.

    Args:
        data: in memory or mapped; where they do not begin at a multiple of 64, tensors are not aligned.
        where: names their source in errors.
        damaged: see `read_entry`.
        coming: brings the layers that are not in `data` yet; everything before the first layer is.
    """
    try:
        metadata, tensors = read_header(data, where)
        return _stored(where, metadata, tensors, damaged, coming)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        # The header is as it was written, but not necessarily by this program.
        raise DamagedEntry(f"{where} has a header that cannot be understood ({error!r})") from error


def _check_order(whole: Sequence[Place], layered: Sequence[Place], count: int) -> None:
    """Raise ValueError unless tensors of `count` layers, in ascending order, fill all that is behind the others."""
    begins, ends = [begin for begin, _ in layered], [end for _, end in layered]
    if not count or any((end - begin) % count for begin, end in layered):
        raise ValueError(f"{count} layers do not divide what there is")
    if begins[1:] != ends[:-1] or any(end > begins[0] for _, end in whole):
        raise ValueError("the layers are not at the end")


def _map_file(path: Path) -> Tensor:
    """The file's bytes (n,) uint8, mapped; reading ahead begins."""
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


def _stored(
    where: object,
    metadata: dict[str, str],
    tensors: dict[str, Tensor],
    damaged: Callable[[str], object],
    coming: Coming | None,
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
            damaged(reason)
            raise DamagedEntry(reason)

        def verified(held: Tensor | QuantisedKV, parts: list[Tensor], checksums: str) -> VerifiedLayers:
            return VerifiedLayers(held, parts, json.loads(metadata[checksums]), refuse, coming)

        asked = tensors.pop(_QUERIES) if has_queries(key.provenance) else None
        queries = None if asked is None else verified(asked, [asked], "query_checksums")
        held = _held(STORAGES[metadata["storage"]], tensors)
        content = ChunkKV(token_ids, verified(held, list(tensors.values()), "layer_checksums"), queries)
    sources = tuple(json.loads(metadata["sources"]))
    return ParsedEntry(key, metadata["model_name"], sources, content)


def _held(storage: Storage, tensors: Mapping[str, Tensor]) -> Tensor | QuantisedKV:
    return tensors[_KV] if storage == "exact" else QuantisedKV(storage=storage, **tensors)


def _key(metadata: Mapping[str, str], tokens: str) -> EntryKey:
    provenance = KVProvenance(
        kind=metadata["kind"],
        context=tuple(json.loads(metadata["context"])),
        exact=metadata["exact"] == "true",
        rope_regime=metadata["rope_regime"],
    )
    content = _CONTENTS[metadata["content"]]
    return EntryKey(metadata["namespace"], metadata["model_digest"], tokens, provenance, content)


def _describe(key: EntryKey, model_name: str, sources: Sequence[str], storage: Storage) -> dict[str, str]:
    return {
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
    }


def _layer_checksums(layered: Mapping[str, Tensor]) -> list[str]:
    """One for each layer, over its part of every tensor in the order of the file."""
    return [checksum(*map(as_bytes, parts)) for parts in zip(*layered.values(), strict=True)]


def _tensors(content: Content, key: EntryKey) -> tuple[dict[str, Tensor], dict[str, Tensor], Storage]:
    """What goes into the file, checked, on the CPU, contiguous and in order: verified whole, and layer by layer."""
    if isinstance(content, ChunkFeature):
        _check_note(content)
        return _ordered(content.tensors), {}, "exact"
    storage = storage_of(content)
    _check_kv(content, storage, key.provenance)
    held = content.held
    if isinstance(held, VerifiedLayers):
        held = held.verified()
    return {}, _ordered(held.tensors() if isinstance(held, QuantisedKV) else {_KV: content.kv}), storage


def _queries(content: Content) -> dict[str, Tensor]:
    """The queries that go into the file after KV, on the CPU and contiguous, if there are any."""
    queries = content.queries if isinstance(content, ChunkKV) else None
    if queries is None:
        return {}
    return _ordered({_QUERIES: queries if isinstance(queries, Tensor) else queries.whole()})


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wider dtypes first, so that each tensor is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in ordered}


def _check_kv(chunk: ChunkKV, storage: Storage, provenance: KVProvenance) -> None:
    shape = tuple(chunk.held.shape)
    if len(shape) != 5 or shape[1] != 2 or shape[3] != chunk.tokens:
        raise InvalidRequest(
            f"kv has shape {shape}; with {chunk.tokens} token ids it must be (L, 2, G, {chunk.tokens}, D)"
        )
    if chunk.held.dtype not in _KV_DTYPES:
        raise InvalidRequest(f"kv has dtype {chunk.held.dtype}; float32, bfloat16 or float16 can be stored")
    if quantised(provenance, storage) != provenance:
        raise InvalidRequest(
            f"kv is stored as {storage}, its making is {provenance.kind}, exact {provenance.exact}; quantised KV is never exact, and "
            "its kind says how it is stored, such as isolated-int8"
        )
    _check_queries(chunk, provenance)


def _check_queries(chunk: ChunkKV, provenance: KVProvenance) -> None:
    if has_queries(provenance) != (chunk.queries is not None):
        raise InvalidRequest(
            f"kv {'without' if chunk.queries is None else 'with'} queries has the making {provenance.kind}; the kind of KV with "
            "queries, and of no other, ends as in observed-qkv"
        )
    if chunk.queries is None:
        return
    shape, (layers, _, _, tokens, width) = tuple(chunk.queries.shape), chunk.held.shape
    if len(shape) != 4 or (shape[0], *shape[2:]) != (layers, tokens, width):
        raise InvalidRequest(
            f"queries have shape {shape}; beside this kv it must be ({layers}, H, {tokens}, {width})"
        )
    if chunk.queries.dtype != chunk.held.dtype:
        raise InvalidRequest(
            f"queries have dtype {chunk.queries.dtype} beside kv of {chunk.held.dtype}; they must be of one"
        )


def _check_note(feature: ChunkFeature) -> None:
    for name, tensor in feature.tensors.items():
        if not _NOTE_TENSOR.fullmatch(name):
            raise InvalidRequest(
                f"a note's tensor is named {name!r}; write a word of lower-case letters, digits and underscores "
                f"that begins with a letter and is neither {_KV} nor {_IDS}"
            )
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InvalidRequest(f"{name} has dtype {tensor.dtype}; a note may hold {known}")
