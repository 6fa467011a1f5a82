"""Hostile entries of the KV store, half of them with right checksums: another program may have written them."""

import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from kvweave.errors import StoreError
from kvweave.kvstore.format import Content, encode_entry, is_finite, open_entry, verify_content
from kvweave.kvstore.header import checksum
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.ops.quantise import quantise
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance
from kvweave_lab.fuzz.campaign import Files, Reader
from kvweave_lab.fuzz.mutations import mutated, mutated_json

_LENGTH_BYTES: Final = 8
_CHECKSUM: Final = re.compile(rb'"checksum_header": ?"[0-9a-f]{16}"')
_IDS: Final = (3, 1, 4, 1, 5)


@cache
def _entries() -> tuple[bytes, ...]:
    """Return entries of KV, of quantised KV and of a feature."""
    kv = torch.arange(2 * 2 * 5 * 4, dtype=torch.float32).reshape(2, 2, 1, 5, 4)
    provenance = KVProvenance("isolated", ("5" * 32,))
    feature = ChunkFeature(_IDS, {"kept": torch.arange(3, dtype=torch.int32), "moved": torch.ones(2, 5)})
    contents: tuple[tuple[Content, Any, KVProvenance], ...] = (
        (ChunkKV(_IDS, kv), "kv", provenance),
        (ChunkKV(_IDS, quantise(kv, "int8")), "kv", quantised(provenance, "int8")),
        (feature, "note", KVProvenance("digest-12", ("5" * 32,), exact=False)),
    )
    return tuple(
        b"".join(
            encode_entry(
                EntryKey("", "a" * 32, digest_tokens(_IDS), source, kind), "tiny", content, ["b" * 32]
            )
        )
        for content, kind, source in contents
    )


def _signed(header: bytes, before: int) -> bytes:
    """Return a header with its length and the checksum that fits it, padded so that tensors are aligned as `before`."""
    header = _CHECKSUM.sub(b'"checksum_header":"0000000000000000"', header, count=1)
    header += b" " * ((before - _LENGTH_BYTES - len(header)) % 64)
    whole = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    return whole.replace(b'"0000000000000000"', f'"{checksum(whole)}"'.encode(), 1)


def _entry(rng: Random) -> Files:
    data = rng.choice(_entries())
    if rng.random() < 0.4:
        return {"entry": mutated(rng, data, (b'"data_offsets":[0,0]', b'"shape":[]'), _entries())}
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header, body = data[_LENGTH_BYTES:end], data[end:]
    header = mutated_json(rng, json.loads(header)) if rng.random() < 0.7 else mutated(rng, header)
    return {"entry": _signed(header, end) + (mutated(rng, body) if rng.random() < 0.1 else body)}


def _read(folder: Path) -> None:
    entry = open_entry(folder / "entry")
    verify_content(entry.content)
    is_finite(entry.content)


ENTRIES: Final = Reader(_entry, _read, (StoreError,))
