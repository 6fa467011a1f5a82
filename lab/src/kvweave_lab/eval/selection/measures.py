"""How two selections, two distributions or two orders compare. Pure functions of tensors."""

import torch
from torch import Tensor

from kvweave.ops.scores import top_tokens
from kvweave_lab.eval.divergence import divergence

_FLOOR = 1e-9  # share of a distribution given to every token alike, so that no divergence is infinite


def common_share(chosen: Tensor, wanted: Tensor) -> Tensor:
    """Share of the wanted tokens that are chosen, |S ∩ G| / |G| (ProphetKV fig. 3).

    Both bool (…, n), broadcast against each other; returns (…). `wanted` must want something.
    """
    return (chosen & wanted).sum(-1).double() / wanted.sum(-1)


def jaccard(left: Tensor, right: Tensor) -> Tensor:
    """|A ∩ B| / |A ∪ B| of bool tensors (…, n), broadcast against each other; returns (…)."""
    return (left & right).sum(-1).double() / (left | right).sum(-1)


def attention_divergence(truth: Tensor, other: Tensor) -> float:
    """KL(truth ‖ other) in nats of two non-negative score vectors (n,), each made to sum to 1."""
    return divergence(_distribution(truth).log(), _distribution(other).log())


def _distribution(scores: Tensor) -> Tensor:
    total = scores.double().sum()
    shares = scores.double() / total if total > 0 else torch.zeros_like(scores, dtype=torch.float64)
    floored = shares + _FLOOR
    return floored / floored.sum()


def rank_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Spearman's correlation of vectors (…, m), ties given their mean rank; (…), 0 where one of two is constant."""
    a, b = (_ranks(values) for values in (left, right))
    a, b = (ranks - ranks.mean(-1, keepdim=True) for ranks in (a, b))
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / size.clamp_min(1e-300), 0.0)


def _ranks(values: Tensor) -> Tensor:
    below = (values[..., None, :] < values[..., :, None]).double().sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).double().sum(-1)
    return below + (equal - 1) / 2


def share_left(loss: Tensor, scores: Tensor, count: int) -> Tensor:
    """Share of a loss that is left when the `count` tokens with the highest scores no longer add to it.

    `loss` (…, n) is not negative, `scores` broadcasts against it; returns (…), 0 where there was no loss
    (ProphetKV eq. 4, as a share).
    """
    scores = scores.expand_as(loss)
    left = loss.double().masked_fill(top_tokens(scores, count), 0.0).sum(-1)
    return left / loss.double().sum(-1).clamp_min(1e-300)
