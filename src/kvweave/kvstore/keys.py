"""What names an entry: the digest of everything its tensors depend on.

Two entries with equal digests are interchangeable, so a lookup needs no comparison but this one. Knows
nothing about files or tables.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np

from kvweave.errors import InvalidRequest
from kvweave.types import KVProvenance, Storage

FORMAT_VERSION = 2
"""Version of the entry files. It is part of every key, so another version's entries are never matched."""

DIGEST_BYTES = 16  # 128 bits: a collision needs about 2**64 entries

ContentKind = Literal["kv", "note"]

_QUERIES = "qkv"
_KIND = re.compile(r"[a-z]+(-[a-z0-9.]+)*")


def digest_tokens(ids: Sequence[int]) -> str:
    """Name a run of tokens by its content.

    Args:
        ids: S token ids, each 0 ≤ id < 2**63; S may be 0.

    Returns:
        32 hex digits: BLAKE2b of the ids as little-endian 64-bit integers.

    Raises:
        OverflowError: an id does not fit into 64 bits.
    """
    return digest_token_bytes(token_bytes(ids))


def digest_token_bytes(data: bytes | memoryview) -> str:
    """`digest_tokens` of ids that are already laid out as by `token_bytes`."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digest_chunks(digests: Iterable[str]) -> str:
    """Name a set of chunks by the digests of their tokens; order and repetition do not matter. 32 hex digits."""
    return blake2b("".join(sorted(set(digests))).encode("ascii"), digest_size=DIGEST_BYTES).hexdigest()


def token_bytes(ids: Sequence[int]) -> bytes:
    """The S ids as little-endian 64-bit integers, 8·S bytes: what is hashed and what is stored."""
    return np.asarray(ids, dtype="<i8").tobytes()


def quantised(provenance: KVProvenance, storage: Storage) -> KVProvenance:
    """What KV of this making is named by when it is stored so: isolated becomes isolated-int8, and not exact.

    A making that says so already stays as it is, and so does every making with the storage exact.
    """
    if storage == "exact":
        return provenance
    kind = provenance.kind if provenance.kind.endswith(f"-{storage}") else f"{provenance.kind}-{storage}"
    return replace(provenance, kind=kind, exact=False)


def with_queries(provenance: KVProvenance) -> KVProvenance:
    """What KV of this making is named by when its tokens' queries are stored beside it: observed becomes observed-qkv.

    It is as exact as it was. A making that says so already stays as it is.
    """
    return (
        provenance if has_queries(provenance) else replace(provenance, kind=f"{provenance.kind}-{_QUERIES}")
    )


def has_queries(provenance: KVProvenance) -> bool:
    """Whether KV of this making has queries beside it."""
    return provenance.kind.endswith(f"-{_QUERIES}")


@dataclass(frozen=True)
class EntryKey:
    """Everything one entry's tensors depend on.

    `namespace` separates knowledge bases that share a tier. `model` is ModelFingerprint.digest (weights,
    tokenizer, configuration and dtype). `tokens` is `digest_tokens` of the chunk's ids. `provenance` says which
    pass the rows came out of. `content` says whether the entry holds the chunk's KV or a note about it.

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
        [context digest, …], kind], ASCII, without spaces; for notes it begins with "kvweave-chunk-note". The
        kind of exact KV is left out, since its context settles it: an isolated entry *is* the exact node
        whose context is just the system prefix, a bare one the node with empty context. With queries it is another
        entry, whose array ends with "qkv" instead.
        """
        made = self.provenance
        fields = [
            f"kvweave-chunk-{self.content}",
            FORMAT_VERSION,
            self.namespace,
            self.model,
            self.tokens,
            made.exact,
            made.rope_regime,
            list(made.context),
        ]
        if self.content != "kv" or not made.exact:
            fields.append(made.kind)
        elif has_queries(made):
            fields.append(_QUERIES)
        text = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
        return blake2b(text.encode("ascii"), digest_size=DIGEST_BYTES).hexdigest()
