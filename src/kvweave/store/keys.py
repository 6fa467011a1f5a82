"""What names an entry: the digest of everything its tensors depend on.

Two entries with equal digests are interchangeable, so a lookup needs no comparison but this one. Knows
nothing about files or tables.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from kvweave.core import Making

FORMAT_VERSION = 1
"""Version of the entry files. It is part of every key, so another version's entries are never matched."""

DIGEST_BYTES = 16  # 128 bits: a collision needs about 2**64 entries


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


def token_bytes(ids: Sequence[int]) -> bytes:
    """The S ids as little-endian 64-bit integers, 8·S bytes: what is hashed and what is stored."""
    return np.asarray(ids, dtype="<i8").tobytes()


@dataclass(frozen=True)
class EntryKey:
    """Everything one entry's tensors depend on.

    `namespace` separates knowledge bases that share a tier. `model` is ModelFingerprint.digest (weights,
    tokenizer, configuration and dtype). `tokens` is `digest_tokens` of the chunk's ids. `making` says which
    pass the rows came out of.
    """

    namespace: str
    model: str
    tokens: str
    making: Making

    @cached_property
    def digest(self) -> str:
        """32 hex digits: BLAKE2b of a JSON array of the fields, which no two different keys share.

        The array is ["kvweave-chunk-kv", FORMAT_VERSION, namespace, model, tokens, exact, rope_regime,
        [context digest, …]], ASCII, without spaces. `making.kind` is left out: an isolated entry *is* the
        exact node whose context is just the system prefix, a bare one the node with empty context.
        """
        made = self.making
        fields = [
            "kvweave-chunk-kv",
            FORMAT_VERSION,
            self.namespace,
            self.model,
            self.tokens,
            made.exact,
            made.rope_regime,
            list(made.context),
        ]
        text = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
        return blake2b(text.encode("ascii"), digest_size=DIGEST_BYTES).hexdigest()
