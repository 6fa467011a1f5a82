"""k-means over the keys of several heads at once, and the division of one cluster in two.

Deterministic: the first centres are points spread evenly over the sequence. Tensor letters: G heads, N points,
K clusters, D width. Knows nothing of attention, files or budgets.
"""

import torch
from torch import Tensor

ITERATIONS = 8
_BLOCK = 2**22  # distances held at a time, elements


def k_means(points: Tensor, clusters: int, iterations: int = ITERATIONS) -> Tensor:
    """Assign points (G, N, D) float32 to at most `clusters` clusters of their head: (G, N) of 0 … clusters − 1.

    Clusters may be empty, where points coincide.
    """
    heads, count, width = points.shape
    clusters = max(1, min(clusters, count))
    first = torch.linspace(0, count - 1, clusters).long()
    centres = points[:, first].clone()  # (G, K, D)
    assigned = nearest(points, centres)
    for _ in range(iterations - 1):
        members = torch.zeros(heads, clusters).scatter_add_(1, assigned, torch.ones(heads, count))
        sums = torch.zeros(heads, clusters, width)
        sums.scatter_add_(1, assigned[..., None].expand(-1, -1, width), points)
        centres = torch.where(members[..., None] > 0, sums / members[..., None].clamp(min=1), centres)
        again = nearest(points, centres)
        if torch.equal(again, assigned):
            break
        assigned = again
    return assigned


def nearest(points: Tensor, centres: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the index of the nearest centre of each point, by squared distance: (G, N, D) and (G, K, D) → (G, N).

    `valid` (G, K) masks centres; each head needs at least one.
    """
    lengths = centres.square().sum(-1)  # (G, K)
    if valid is not None:
        lengths = lengths.masked_fill(~valid, float("inf"))
    heads, count, _ = points.shape
    block = max(1, _BLOCK // max(1, heads * centres.shape[1]))
    parts = [
        (lengths[:, None] - 2 * points[:, start : start + block] @ centres.transpose(1, 2)).argmin(-1)
        for start in range(0, count, block)
    ]
    return torch.cat(parts, dim=1) if parts else points.new_empty(heads, 0, dtype=torch.long)


def members(points: Tensor, assigned: Tensor, largest: int) -> list[Tensor]:
    """Return the indices of each cluster's points (n, D), given their assignment (n,) by k-means.

    Empty clusters are left out, and those above `largest` are split.
    """
    order = assigned.argsort(stable=True)
    pending = [own for own in order.split(torch.bincount(assigned).tolist()) if own.numel()]
    clusters: list[Tensor] = []
    while pending:
        own = pending.pop()
        if own.numel() <= largest:
            clusters.append(own)
            continue
        side = split_in_two(points[own], own.numel() - 1)
        pending += [own[~side], own[side]]
    return clusters[::-1]


def split_in_two(points: Tensor, largest: int) -> Tensor:
    """Divide points (N, D) in two, none empty and none above `largest` (at least half of them): (N,) bool.

    Runs 2-means from the two ends of the direction in which the points spread most. If that leaves a side empty or
    too large, cuts the points at the median of that direction.
    """
    count = points.shape[0]
    assert count >= 2
    assert largest >= (count + 1) // 2
    centred = points - points.mean(0)
    direction = centred[centred.square().sum(-1).argmax()]
    for _ in range(4):  # power iteration
        direction = centred.T @ (centred @ direction)
        direction = direction / direction.norm().clamp(min=1e-30)
    along = centred @ direction  # (N,)
    ends = points[torch.stack([along.argmin(), along.argmax()])]
    side = _two_means(points, ends)
    larger = max(int(side.sum()), count - int(side.sum()))
    if larger == count or larger > largest:
        side = torch.zeros(count, dtype=torch.bool)
        side[along.argsort(stable=True)[count // 2 :]] = True
    return side


def _two_means(points: Tensor, centres: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Run 2-means of points (N, D) from given centres (2, D); return which points belong to the second, (N,) bool."""
    side = nearest(points[None], centres[None])[0].bool()
    for _ in range(iterations - 1):
        if side.all() or not side.any():
            break
        centres = torch.stack([points[~side].mean(0), points[side].mean(0)])
        again = nearest(points[None], centres[None])[0].bool()
        if torch.equal(again, side):
            break
        side = again
    return side
