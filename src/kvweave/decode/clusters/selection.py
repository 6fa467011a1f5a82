"""What a query asks for: clusters scored by their centroids, and of what they hold the entries that weigh most.

Tensor letters: G KV heads, R query rows of a head's group, C clusters, D head width. Knows nothing of files.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.ops.partial_attention import capped


def score(query: Tensor, centroids: Tensor, sizes: Tensor, softcap: float | None) -> Tensor:
    """What an entry of each cluster is expected to weigh, (G, C), summed over the query heads that share a KV head.

    `query` (G, R, D) float32 with the attention's scaling applied, `centroids` (G, C, D), `sizes` (G, C); 0 marks a
    cluster that is none. An entry is taken to weigh what its centroid would: per row a softmax over clusters, each
    counted as often as it has entries. Summed over rows, heads that attend sharply count as much as others.
    """
    logits = capped(query @ centroids.transpose(1, 2), softcap)  # (G, R, C)
    mass = (logits + sizes.log()[:, None]).logsumexp(-1, keepdim=True)
    weights = (logits - mass).exp().sum(1)  # (G, C)
    return weights.masked_fill(sizes == 0, -1.0)


def choose(scores: Tensor, sizes: NDArray[np.int64], left: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Per head the best clusters that together have at most `left` (G,) entries; one that does not fit is passed over.

    `scores` (G, C), negative for columns that are no cluster; `sizes` (G, C).
    """
    values = scores.numpy()
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(sizes, order, axis=1)
    valid = np.take_along_axis(values, order, axis=1) >= 0
    taken = np.zeros_like(valid)
    room = left.copy()
    for _ in range(2):  # the best that fit together, then smaller ones that fill what is left
        fits = valid & ~taken & (ranked <= room[:, None])
        now = fits & (np.cumsum(np.where(fits, ranked, 0), axis=1) <= room[:, None])
        taken |= now
        room -= np.where(now, ranked, 0).sum(1)
    return [order[head, taken[head]] for head in range(len(order))]


def best_entries(logits: Tensor, log_mass: Tensor, left: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The entries that weigh most, `left` (G,) of each head, summed over the rows that share it.

    Indices (G, k) in no order, and which of them count, (G, k) bool: heads may have different numbers. `logits` (G, R, n),
    −inf for what is hidden; each head has as many that are not. `log_mass` (G, R) of all that is attended to besides.
    """
    most = logits.amax(-1, keepdim=True)
    most = most.masked_fill(most == float("-inf"), 0.0)
    shares = (logits - most).exp()
    whole = torch.logaddexp(shares.sum(-1).log() + most[..., 0], log_mass)  # (G, R)
    scale = (most[..., 0] - whole).exp().nan_to_num(0.0, 0.0)  # rows that see nothing count for nothing
    weights = (scale[:, None] @ shares)[:, 0]  # (G, n)
    weights = weights.masked_fill(logits[:, 0] == float("-inf"), -1.0)
    best = torch.zeros(len(left), int(left.max()), dtype=torch.long, device=logits.device)
    for head, count in enumerate(left.tolist()):
        best[head, :count] = weights[head].topk(count, sorted=False).indices
    there = torch.arange(best.shape[1]) < torch.from_numpy(left)[:, None]
    return best, there.to(logits.device)


def sizes_tensor(sizes: NDArray[np.int64]) -> Tensor:
    """Sizes (G, C) as float32, for `score`."""
    return torch.from_numpy(sizes).float()
