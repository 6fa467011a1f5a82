"""Selections that leave no token on its own: windows of neighbouring tokens, kept only where many are selected.

Nothing here knows models, prompts or methods.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def kept_from(scores: Tensor, lengths: Sequence[int], *, window: int, more_than: int) -> Tensor:
    """How many of the highest-scoring tokens have to be selected before each token is kept (CacheClip §3.3).

    Tokens are cut into windows of `window`, beginning anew with each run of `lengths`; a run's last window may be
    shorter. Of a selection, a window's selected tokens are kept if there are more than `more_than` of them, which is
    below `window`. So the k tokens with the highest scores (n,), ties to the first, keep those whose count here is at
    most k.

    Returns:
        (n,) int64: 1 … n; above n where a window is too short ever to be kept, there in the order of the scores.
    """
    count = scores.numel()
    rank = torch.empty(count, dtype=torch.long)
    rank[scores.argsort(descending=True, stable=True)] = torch.arange(1, count + 1)
    if not count:
        return rank
    places, real = _windows(lengths, window)
    never = count + 1
    ranks = rank[places].masked_fill(~real, never)  # (windows, window)
    enough = ranks.sort(dim=1).values[:, more_than, None]  # the selection that first has enough of a window
    kept = torch.where(enough == never, count + ranks, ranks.maximum(enough))
    return torch.empty_like(rank).scatter_(0, places[real], kept[real])


def _windows(lengths: Sequence[int], window: int) -> tuple[Tensor, Tensor]:
    """Token numbers of all windows, (windows, window), and which of them are there: the others repeat the last one."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    pieces = (sizes + window - 1) // window
    run = torch.arange(len(sizes)).repeat_interleave(pieces)
    number = torch.arange(len(run)) - (pieces.cumsum(0) - pieces)[run]  # of the window in its run
    first = (ends - sizes)[run] + number * window
    places = first[:, None] + torch.arange(window)
    last = ends[run, None] - 1
    return places.minimum(last), places <= last
