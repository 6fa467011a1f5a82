"""Scores of context tokens, as pure reductions: how much rows attend to them, how far their KV is off.

Selectors rank tokens by these. Nothing here knows models, prompts or methods.

Tensor letters: B batch, H query heads, G KV heads, R query rows, S keys, D head width, n tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvweave.ops.logits import block_rows, masked_logits, visible_keys


def mean_attention(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """Softmax weights of query rows on keys, averaged over rows and heads.

    Query (B, H, R, D) stands at prompt positions `rows` (R,), keys (B, G, S, D) at 0 … S − 1; a row sees what
    `ops.attention.attend_reference` lets it see. With `columns` (first, end) the softmax runs over those keys
    alone; a row that sees none of them counts as zeros. Logits are made in the query's dtype, as attention
    makes them, and the softmax in float32. Returns (B, end − first), float32.
    """
    first, end = columns or (0, keys.shape[2])
    batch, heads, count, _ = query.shape
    total = torch.zeros(batch, end - first, device=keys.device)
    for weights in _weights(query, rows, keys, scaling, window, softcap, (first, end)):
        total += weights.sum(dim=(1, 2))
    return total / max(1, heads * count)


def peak_attention(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The largest softmax weight of any query row and head on each key, (B, S), float32; as `mean_attention` else."""
    peak = torch.zeros(query.shape[0], keys.shape[2], device=keys.device)
    for weights in _weights(query, rows, keys, scaling, window, softcap, (0, keys.shape[2])):
        peak = torch.maximum(peak, weights.amax(dim=(1, 2)))
    return peak


def attention_shares(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    parts: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """How each query row's attention divides among parts of the keys, averaged over heads; as `mean_attention` else.

    `parts` (S, P) is 1 where a key belongs to a part. Returns (B, R, P), float32.
    """
    shares = [torch.zeros(query.shape[0], 0, parts.shape[1], device=keys.device)]
    for weights in _weights(query, rows, keys, scaling, window, softcap, (0, keys.shape[2])):
        shares.append(weights.mean(dim=1) @ parts.float())  # (B, rows, P)
    return torch.cat(shares, dim=1)


def _weights(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    columns: tuple[int, int],
) -> Iterator[Tensor]:
    """Softmax weights (B, H, rows, end − first) of blocks of rows, in order; zeros for a row that sees no key."""
    first, end = columns
    batch, heads, count, _ = query.shape
    block = block_rows(batch, heads, end - first, keys.device)
    for start in range(0, count, block):
        visible = visible_keys(rows[start : start + block], first, end, window)  # (rows, keys)
        q = query[:, :, start : start + block]
        logits = masked_logits(q, keys[:, :, first:end], visible, scaling=scaling, softcap=softcap)
        weights = logits.softmax(dim=-1)
        blind = ~visible.any(dim=-1, keepdim=True)  # (rows, 1)
        if not blind.is_cpu or bool(blind.any()):
            weights = weights.masked_fill_(blind, 0.0)
        yield weights


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Which tokens are among the `count` with the highest scores: bool like `scores` (…, n); ties go to the first."""
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)


def residual_norms(weights: Tensor, values: Tensor, stale_weights: Tensor, stale_values: Tensor) -> Tensor:
    """What each token, left stale, adds to the bound on the attention output's error (ProphetKV eq. 5).

    Attention weights (n,) averaged over rows and heads, values (G, n, D), each under full attention and over
    stale KV. Returns ‖Φ V − Φ′ V′‖₂ over all heads and dims, (n,), float32.
    """
    off = weights[:, None] * values.float() - stale_weights[:, None] * stale_values.float()  # (G, n, D)
    return off.square().sum(dim=(0, 2)).sqrt()


def kv_deviation(full: Tensor, stale: Tensor) -> Tensor:
    """Squared distance of each token's stale keys or values from full attention's (FusionRAG eq. 7).

    Both (G, n, D), at the same positions; rotated or not makes no difference. Returns (n,), float32.
    """
    return (full.float() - stale.float()).square().sum(dim=(0, 2))
