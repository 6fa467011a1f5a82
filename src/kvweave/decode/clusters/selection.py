"""Selection by a query: clusters scored by their centroids, and the best that fit a limit.

Tensor letters: G KV heads, R query rows of a head's group, C clusters, D head width. Knows nothing of files.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.ops.attention import apply_softcap


def score_clusters(
    query: Tensor, centroids: Tensor, sizes: NDArray[np.int64], softcap: float | None
) -> Tensor:
    """Return the expected weight of an entry of each cluster, (G, C), summed over the query heads of a KV head.

    An entry is expected to have its centroid's weight: per row a softmax over clusters, each counted once per entry. With
    this sum, heads that attend sharply count as much as others.

    Args:
        query: (G, R, D) float32, scaled.
        centroids: (G, C, D).
        sizes: (G, C); 0 marks a column without a cluster, whose score is negative.
        softcap: the layer's own, None where it has none.
    """
    counts = torch.from_numpy(sizes).float()
    logits = apply_softcap(query @ centroids.transpose(1, 2), softcap)  # (G, R, C)
    mass = (logits + counts.log()[:, None]).logsumexp(-1, keepdim=True)
    weights = (logits - mass).exp().sum(1)  # (G, C)
    return weights.masked_fill(counts == 0, -1.0)


def select_clusters(
    scores: Tensor, sizes: NDArray[np.int64], limits: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return per head the best clusters with at most `limits` (G,) entries in all; one that does not fit is skipped.

    `scores` (G, C) are negative for columns without a cluster; `sizes` is (G, C).
    """
    values = scores.numpy()
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(sizes, order, axis=1)
    valid = np.take_along_axis(values, order, axis=1) >= 0
    selected = np.zeros_like(valid)
    room = limits.copy()
    for _ in range(2):  # the best that fit together, then smaller ones that fill the rest
        fits = valid & ~selected & (ranked <= room[:, None])
        now = fits & (np.cumsum(np.where(fits, ranked, 0), axis=1) <= room[:, None])
        selected |= now
        room -= np.where(now, ranked, 0).sum(1)
    return [order[head, selected[head]] for head in range(len(order))]
