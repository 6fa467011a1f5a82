"""A key by which a router sends requests with the same heavy chunks to the same replica."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from kvweave.kvstore.keys import digest_tokens

HEADER: Final = "x-session-id"
"""The header from which vllm-router's `consistent_hash`, and the production stack with `--session-key`, take a key."""


def session_headers(params: Mapping[str, Any], token_ids: Sequence[int], tenant: str = "") -> dict[str, str]:
    """Return the header for a request with these `kv_transfer_params`; none without chunks. A chunk is prepared where its requests go."""
    fields = params.get("kvweave", {})
    spans = fields.get("spans", ())[-1:] if fields.get("prepare") else fields.get("spans", ())
    key = session_key((token_ids[start:end] for start, end, *_ in spans), tenant)
    return {HEADER: key} if key else {}


def session_key(chunks: Iterable[Sequence[int]], tenant: str = "") -> str:
    """Return the key of a request with these chunks, given by their token ids: 32 hex digits; "" without chunks.

    It names one of the chunks, the heaviest ones most often: a min-hash weighted by tokens (exponential clocks: each chunk's time is
    drawn from its digest at a rate of its tokens, and the earliest wins). The order of the chunks does not matter. Two requests
    have the same key with a probability of the tokens that they share over those of either. A chunk's key is that of the
    requests that it names, so that its preparation goes where they go. No two tenants share a key.
    """
    times = [(_time(name, len(ids)), name) for ids in chunks if ids for name in [_name(ids, tenant)]]
    return min(times)[1] if times else ""


def _name(ids: Sequence[int], tenant: str) -> str:
    return blake2b(json.dumps([tenant, digest_tokens(ids)]).encode(), digest_size=16).hexdigest()


def _time(name: str, tokens: int) -> float:
    uniform = (int(name[:13], 16) + 1) / 2**52  # 0 < uniform ≤ 1, exact in a double
    return -math.log(uniform) / tokens
