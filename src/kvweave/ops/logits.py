"""Attention logits written out, for what needs weights or sums of them; the fused kernels show neither.

Tensor letters: B batch, H query heads, G KV heads, R query rows, S keys, D head width.
"""

import torch
from torch import Tensor

MAX_LOGITS = 2**24  # elements held at a time: rows are taken in blocks, whatever their number
CPU_LOGITS = (
    2**20
)  # on a CPU: what needs more comes in fresh pages each time, which costs more than another block does


def block_rows(batch: int, heads: int, keys: int, device: torch.device) -> int:
    """How many query rows at a time keep their logits within MAX_LOGITS, on a CPU within CPU_LOGITS; one at least."""
    most = min(MAX_LOGITS, CPU_LOGITS) if device.type == "cpu" else MAX_LOGITS
    return max(1, most // max(1, batch * heads * keys))


def visible_keys(rows: Tensor, first: int, end: int, window: int | None) -> Tensor:
    """Which of the keys at positions first … end − 1 each row (R,) sees, (R, end − first), bool.

    Those at or before its own position and, with a sliding `window`, less than `window` positions before it.
    """
    positions = torch.arange(first, end, device=rows.device)
    visible = positions[None, :] <= rows[:, None]
    if window is not None:
        visible &= positions[None, :] > rows[:, None] - window
    return visible


def masked_logits(
    query: Tensor, keys: Tensor, visible: Tensor, *, scaling: float, softcap: float | None
) -> Tensor:
    """Logits of query (B, H, R, D) on keys (B, G, S, D), −inf where `visible` (R, S) is false.

    Made in the query's dtype, as attention makes them; returns (B, H, R, S), float32, owned by the caller.
    """
    batch, heads, rows, width = query.shape
    # Heads that share keys follow each other: fold them into the rows instead of repeating the keys.
    folded = query.reshape(batch, keys.shape[1], -1, width)  # (B, G, H/G · R, D)
    logits = (
        (folded @ keys.transpose(2, 3)).float().reshape(batch, heads, rows, -1).mul_(scaling)
    )  # (B, H, R, S)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if visible.is_cpu and bool(
        visible.all()
    ):  # a question sees all of its context; asking a GPU would wait for it
        return logits
    return logits.masked_fill_(~visible, float("-inf"))
