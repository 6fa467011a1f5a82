"""Attention logits written out, for ops that need weights or sums of them, which fused kernels do not return.

Tensor letters: B batch, H query heads, G KV heads, R query rows, S keys, D head width.
"""

import torch
from torch import Tensor

MAX_LOGITS = 2**24  # elements held at a time: rows run in blocks of this size
CPU_LOGITS = (
    2**20
)  # on a CPU; a larger block needs fresh memory pages each time, which costs more than another block


def rows_per_block(batch: int, heads: int, keys: int, device: torch.device) -> int:
    """Return the number of query rows whose logits fit MAX_LOGITS, on a CPU CPU_LOGITS; at least one."""
    most = min(MAX_LOGITS, CPU_LOGITS) if device.type == "cpu" else MAX_LOGITS
    return max(1, most // max(1, batch * heads * keys))


def visible_keys(rows: Tensor, first: int, end: int, window: int | None) -> Tensor:
    """Return which of the keys at positions first … end − 1 each row (R,) sees, (R, end − first), bool.

    A row sees keys at or before its own position and, with a sliding `window`, fewer than `window` positions before it.
    """
    positions = torch.arange(first, end, device=rows.device)
    visible = positions[None, :] <= rows[:, None]
    if window is not None:
        visible &= positions[None, :] > rows[:, None] - window
    return visible


def masked_logits(
    query: Tensor, keys: Tensor, visible: Tensor, *, scaling: float, softcap: float | None
) -> Tensor:
    """Return the logits of query (B, H, R, D) on keys (B, G, S, D), −inf where `visible` (R, S) is false.

    Made in the query's dtype, as attention makes them. Returns (B, H, R, S), float32, owned by the caller.
    """
    batch, heads, rows, width = query.shape
    # Heads that share keys follow each other: fold them into the rows instead of repeating the keys.
    folded = query.reshape(batch, keys.shape[1], -1, width)  # (B, G, H/G · R, D)
    logits = (folded @ keys.transpose(2, 3)).float()
    logits = logits.reshape(batch, heads, rows, -1).mul_(scaling)  # (B, H, R, S)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    # A question sees all of its context. On a GPU the check would wait for the device.
    if visible.is_cpu and bool(visible.all()):
        return logits
    return logits.masked_fill_(~visible, float("-inf"))


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return soft-capped logits, or the logits themselves without a cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
