"""The selections that are compared, and one prompt's numbers for each of them.

A selection ranks the context's tokens by scores, higher first. The measures below it are pure functions of tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvweave.ops.scores import top_tokens
from kvweave.recipes.request import Budget
from kvweave_lab.eval.selection.observe import Context, Differences, FullView, StaleView
from kvweave_lab.statistics import kl_divergence

SELECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "question_stale": "attended by the question over stale KV, mean over layers (ProphetKV eq. 7)",
        "question_stale_first": "the same, first layer alone (ProphetKV fig. 7)",
        "question_stale_last": "the same, last layer alone (FusionRAG §3.2, over stale KV)",
        "question_stale_mass": "question over stale KV, softmax over all it sees, mean over layers",
        "rows_stale": "attended by all rows after the context over stale KV, mean over layers",
        "question_full": "attended by the question under full attention, mean over layers",
        "rows_full": "attended by all rows after the context under full attention, mean over layers",
        "decoding": "attended by the decoded answer under full attention, mean over layers",
        "optimal": "largest residual of ProphetKV eq. 5, mean over layers (App. F)",
        "deviation": "values of the second layer that are furthest off (CacheBlend)",
        "kvshare": "the same, weighted by what the first layer's rows attend to (KVShare)",
        "position": "the first tokens of every chunk (EPIC)",
        "random": "any tokens",
    }
)
"""Every selection by name, in the order of all tables, and what it ranks by."""

FACTORS: Mapping[str, str] = MappingProxyType(
    {
        "ideal": "‖ΦV − Φ′V′‖, eq. 5 itself",
        "attention_change": "|ΔΦ|",
        "stale_attention": "Φ′, which needs no full pass",
        "value_change": "‖ΔV‖",
        "stale_value": "‖V′‖",
    }
)
"""The factors of ProphetKV eq. 6 by name; each one ranks the tokens of every layer separately."""

LAYER_CURVES: Mapping[str, str] = MappingProxyType(
    {
        "stale": "over stale KV, among the decode-attended tokens (mean over layers)",
        "full": "under full attention, among the decode-attended tokens (mean over layers)",
        "stale_same": "over stale KV, among the tokens that decoding attends to in the same layer",
    }
)
"""Among which tokens a curve looks for those to which one layer's question rows attend most."""

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the context at which curves are measured."""

DEPTHS = 10
"""The parts of a chunk by which its tokens are counted: tenths."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt's numbers under one preparation; float64 on the CPU.

    S selections, F factors, L layers, P ratios, C chunks of the prompt. Every selection takes ⌈ratio · n⌉ of the
    context's n tokens, exact ones included. KV of the first layer does not depend on earlier tokens, so nothing is lost
    there: losses and optimal tokens are those of the layers from the second one on (L′ = L − 1 layers).

    Attributes:
        overlap: (S, S) share of tokens in common, at the asked ratio.
        jaccard: (S, S) the same as Jaccard index.
        by_ratio: (S, P) share of the decode-attended tokens that are selected (ProphetKV fig. 3, 4).
        with_optimal: (S, L′) share of each layer's own optimal tokens that are selected (ProphetKV fig. 7).
        layers: (3, L) share found by each layer's question rows if they alone select; rows as LAYER_CURVES.
        loss: (F, P) share of the loss left by each factor, mean over layers (ProphetKV fig. 6).
        selection_loss: (S, P) share of the loss left by each selection, the same tokens in all layers.
        depths: (S, DEPTHS) share of the selected tokens by tenth of their chunk (FusionRAG fig. 8).
        chunks: (S, C) share of the selected tokens by chunk.
        deviation: (2, L) mean squared deviation of a token's keys and values (FusionRAG eq. 7).
        relative: (L,) deviation of keys and values as a share of their squared length.
        deviation_left: (L,) share of the layer's deviation outside its worst tokens, at the asked ratio
            (FusionRAG fig. 3a).
        deviation_depths: (DEPTHS,) share of the second layer's deviation by tenth of the chunk (fig. 3b).
        deviation_chunks: (C,) share of the second layer's deviation by chunk.
    """

    overlap: Tensor
    jaccard: Tensor
    by_ratio: Tensor
    with_optimal: Tensor
    layers: Tensor
    loss: Tensor
    selection_loss: Tensor
    depths: Tensor
    chunks: Tensor
    deviation: Tensor
    relative: Tensor
    deviation_left: Tensor
    deviation_depths: Tensor
    deviation_chunks: Tensor


def measure(
    full: FullView, stale: StaleView, off: Differences, scored: Mapping[str, Tensor], ratio: float
) -> Measured:
    """Compare two views of one prompt; `scored` as `selection_scores` returns it, `ratio` above 0."""
    context = full.context
    scores = torch.stack(list(scored.values()))  # (S, n)
    count = Budget(ratio).max_rows(context.tokens)
    chosen = top_tokens(scores, count)  # (S, n)
    residual = off.residual[min(1, len(off.residual) - 1) :]  # (L′, n)
    deviation = off.keys + off.values
    second = deviation[min(1, len(deviation) - 1)]
    return Measured(
        overlap=common_share(chosen[:, None], chosen[None]),
        jaccard=jaccard(chosen[:, None], chosen[None]),
        by_ratio=_by_ratio(scores, context.tokens),
        with_optimal=common_share(chosen[:, None], top_tokens(residual, count)[None]),
        layers=_layers(full, stale, count),
        loss=_losses(residual, factor_scores(full, stale, off)[:, -len(residual) :]),
        selection_loss=_losses(residual, scores[:, None]),
        depths=_shares(chosen, _tenths(context), DEPTHS),
        chunks=_shares(chosen, context.chunk, len(context.lengths)),
        deviation=torch.stack([off.keys, off.values]).double().mean(-1),
        relative=deviation.double().sum(-1) / off.size.double().sum(-1),
        deviation_left=share_left(deviation, deviation, count),
        deviation_depths=_shares(second, _tenths(context), DEPTHS),
        deviation_chunks=_shares(second, context.chunk, len(context.lengths)),
    )


def selection_scores(full: FullView, stale: StaleView, off: Differences, seed: int) -> Mapping[str, Tensor]:
    """Return the scores (n,) of every selection, the same for all layers, in the order of SELECTIONS."""
    second = min(1, len(off.values) - 1)
    before, after = stale.attended, full.attended
    scores = {
        "question_stale": before.fused(before.question),
        "question_stale_first": before.question[0],
        "question_stale_last": before.question[before.layers[-1]],
        "question_stale_mass": before.fused(before.mass),
        "rows_stale": before.fused(before.rows),
        "question_full": after.fused(after.question),
        "rows_full": after.fused(after.rows),
        "decoding": full.decoded,
        "optimal": off.residual.mean(0),
        "deviation": off.values[second],
        "kvshare": full.inflow * off.shift[second],
        "position": -full.context.offset.float(),
        "random": torch.rand(full.context.tokens, generator=torch.Generator().manual_seed(seed)),
    }
    return {name: scores[name] for name in SELECTIONS}


def factor_scores(full: FullView, stale: StaleView, off: Differences) -> Tensor:
    """Return the scores of every factor of ProphetKV eq. 6: (factors, L, n), in the order of FACTORS."""
    before, after = stale.attended.mass, full.attended.mass
    scores = {
        "ideal": off.residual,
        "attention_change": (after - before).abs(),
        "stale_attention": before,
        "value_change": off.values,
        "stale_value": off.stale_values,
    }
    return torch.stack([scores[name] for name in FACTORS])


def _counts(tokens: int) -> Sequence[int]:
    return [Budget(ratio).max_rows(tokens) for ratio in RATIOS]


def _by_ratio(scores: Tensor, tokens: int) -> Tensor:
    decoding = list(SELECTIONS).index("decoding")
    parts = []
    for count in _counts(tokens):
        chosen = top_tokens(scores, count)
        parts.append(common_share(chosen, chosen[decoding]))
    return torch.stack(parts, dim=-1)  # (S, P)


def _layers(full: FullView, stale: StaleView, count: int) -> Tensor:
    before, after, decoding = (
        top_tokens(scores, count)
        for scores in (stale.attended.question, full.attended.question, full.decoding)
    )
    fused = top_tokens(full.decoded, count)
    pairs = ((before, fused), (after, fused), (before, decoding))  # as LAYER_CURVES
    return torch.stack([common_share(chosen, wanted) for chosen, wanted in pairs])  # (3, L)


def _losses(residual: Tensor, scores: Tensor) -> Tensor:
    """Return the share of the loss left, mean over layers: residual (L′, n), scores (F, L′ or 1, n) → (F, P)."""
    counts = _counts(residual.shape[-1])
    return torch.stack(
        [torch.stack([share_left(residual, ranked, count).mean() for count in counts]) for ranked in scores]
    )


def _tenths(context: Context) -> Tensor:
    return (context.depth * DEPTHS).long().clamp_(max=DEPTHS - 1)


def _shares(amounts: Tensor, places: Tensor, count: int) -> Tensor:
    """Return the share of amounts (…, n) at each of `count` places: (…, count); zeros for amounts of zero."""
    amounts = amounts.double()
    sums = amounts.new_zeros(*amounts.shape[:-1], count).index_add_(-1, places, amounts)
    return sums / sums.sum(-1, keepdim=True).clamp_min(1e-300)


_FLOOR = 1e-9  # added to every token's share of a distribution, so that no divergence is infinite


def common_share(chosen: Tensor, wanted: Tensor) -> Tensor:
    """Return the share of the wanted tokens that are chosen, |S ∩ G| / |G| (ProphetKV fig. 3).

    Both bool (…, n), broadcast against each other; returns (…). `wanted` must not be empty.
    """
    return (chosen & wanted).sum(-1).double() / wanted.sum(-1)


def jaccard(left: Tensor, right: Tensor) -> Tensor:
    """Return |A ∩ B| / |A ∪ B| of bool tensors (…, n), broadcast against each other; (…)."""
    return (left & right).sum(-1).double() / (left | right).sum(-1)


def share_left(loss: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the share of a loss that is left without the `count` tokens with the highest scores.

    `loss` (…, n) is not negative, `scores` broadcasts against it; returns (…), 0 if there was no loss (ProphetKV eq. 4,
    as a share).
    """
    scores = scores.expand_as(loss)
    left = loss.double().masked_fill(top_tokens(scores, count), 0.0).sum(-1)
    return left / loss.double().sum(-1).clamp_min(1e-300)


def attention_divergence(truth: Tensor, other: Tensor) -> float:
    """Return KL(truth ‖ other) in nats of two non-negative score vectors (n,), each normalised to sum 1."""
    return kl_divergence(_distribution(truth).log(), _distribution(other).log())


def rank_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return Spearman's correlation of vectors (…, m), ties with their mean rank; (…), 0 if one is constant."""
    a, b = (_ranks(values) for values in (left, right))
    a, b = (ranks - ranks.mean(-1, keepdim=True) for ranks in (a, b))
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / size.clamp_min(1e-300), 0.0)


def _distribution(scores: Tensor) -> Tensor:
    total = scores.double().sum()
    shares = scores.double() / total if total > 0 else torch.zeros_like(scores, dtype=torch.float64)
    floored = shares + _FLOOR
    return floored / floored.sum()


def _ranks(values: Tensor) -> Tensor:
    below = (values[..., None, :] < values[..., :, None]).double().sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).double().sum(-1)
    return below + (equal - 1) / 2
