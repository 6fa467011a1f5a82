"""The key of an entry: a digest of everything that its tensors depend on.

Two entries with equal digests are interchangeable, so a look-up compares nothing else. Knows nothing about files or tables.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Literal

from kvweave.errors import InvalidRequest
from kvweave.types import KVProvenance, Storage

FORMAT_VERSION = 2
"""Version of the entry files. It is part of every key, so entries of another version never match."""

DIGEST_BYTES = 16  # 128 bits: a collision needs about 2**64 entries

ContentKind = Literal["kv", "note"]
"""What an entry holds: a chunk's KV, or a feature of the chunk, stored as "note"."""

_QUERIES = "qkv"
_KIND = re.compile(r"[a-z]+(-[a-z0-9.]+)*")


@dataclass(frozen=True)
class EntryKey:
    """Everything that the tensors of one entry depend on.

    `namespace` separates knowledge bases that share a tier. `model` is ModelFingerprint.digest (weights,
    tokenizer, configuration and dtype). `tokens` is `digest_tokens` of the chunk's ids. `provenance` says which
    pass computed the rows. `content` says whether the entry holds the chunk's KV or a feature of it.

    Raises:
        InvalidRequest: `provenance.kind` is no label such as isolated or similar-10.
    """

    namespace: str
    model: str
    tokens: str
    provenance: KVProvenance
    content: ContentKind = "kv"

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.provenance.kind):
            raise InvalidRequest(
                f"{self.provenance.kind!r} does not name a kind of entry; write a word of lower-case letters, then "
                "words of letters, digits and full stops after hyphens, such as isolated or similar-10"
            )

    @cached_property
    def digest(self) -> str:
        """32 hex digits: BLAKE2b of a JSON array of the fields, which no two different keys share.

        The array is ["kvweave-chunk-kv", FORMAT_VERSION, namespace, model, tokens, exact, rope_regime,
        [context digest, …], kind], ASCII, without spaces. For features it begins with "kvweave-chunk-note". The
        kind of exact KV is left out, because its context determines it. An isolated entry *is* the exact entry
        whose context is the system prefix alone; a bare one has an empty context. Exact KV with queries is a separate
        entry, whose array ends with "qkv".
        """
        provenance = self.provenance
        fields = [
            f"kvweave-chunk-{self.content}",
            FORMAT_VERSION,
            self.namespace,
            self.model,
            self.tokens,
            provenance.exact,
            provenance.rope_regime,
            list(provenance.context),
        ]
        if self.content != "kv" or not provenance.exact:
            fields.append(provenance.kind)
        elif has_queries(provenance):
            fields.append(_QUERIES)
        text = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
        return _digest(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class LookUp:
    """What is looked for: the first of `candidates` that is stored, all of the chunk with these `token_ids`."""

    candidates: Sequence[EntryKey]
    token_ids: Sequence[int]


# Digests of tokens and chunks


def digest_tokens(ids: Sequence[int]) -> str:
    """Return a digest of a run of tokens.

    Args:
        ids: S token ids, each 0 ≤ id < 2**63; S may be 0.

    Returns:
        32 hex digits: BLAKE2b of the ids as little-endian 64-bit integers.

    Raises:
        OverflowError: an id does not fit into 64 bits.
    """
    import numpy as np  # here: listing documents takes half as long without it

    return digest_token_bytes(np.asarray(ids, dtype="<i8").tobytes())


def digest_token_bytes(data: bytes | memoryview) -> str:
    """Return `digest_tokens` of ids that are little-endian 64-bit integers already, 8·S bytes."""
    return _digest(data)


def digest_chunks(digests: Iterable[str]) -> str:
    """Return a digest of a set of chunks, given by the digests of their tokens: 32 hex digits.

    Order and repetition do not matter.
    """
    return _digest("".join(sorted(set(digests))).encode("ascii"))


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


# Provenances of what is stored


def quantised(provenance: KVProvenance, storage: Storage) -> KVProvenance:
    """Return the provenance under which KV is stored in this storage: isolated becomes isolated-int8, not exact.

    Exact storage changes nothing, and neither does a provenance that names the storage already.
    """
    if storage == "exact":
        return provenance
    kind = provenance.kind if provenance.kind.endswith(f"-{storage}") else f"{provenance.kind}-{storage}"
    return replace(provenance, kind=kind, exact=False)


def has_queries(provenance: KVProvenance) -> bool:
    """Whether the entry also holds the queries of its tokens, as earlier versions could store them; nothing reads these."""
    return provenance.kind.endswith(f"-{_QUERIES}")
