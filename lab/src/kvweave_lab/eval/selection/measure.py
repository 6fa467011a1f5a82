"""One prompt's numbers: what its two views say about every selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvweave.ops.scores import top_tokens
from kvweave.recipes.request import Budget
from kvweave_lab.eval.selection.context import Context
from kvweave_lab.eval.selection.differences import Differences
from kvweave_lab.eval.selection.measures import common_share, jaccard, share_left
from kvweave_lab.eval.selection.observe import FullView, StaleView
from kvweave_lab.eval.selection.rankings import SELECTIONS, factor_scores

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the context at which curves are taken."""

DEPTHS = 10
"""A chunk's tokens are told apart by tenths of the chunk."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt's numbers under one preparation; float64 on the CPU.

    S selections, F factors, L layers, P ratios, C chunks of the prompt. Every selection takes ⌈ratio · n⌉ of the
    context's n tokens, exact ones among them. KV of the first layer does not depend on what stands before, so
    nothing is lost there: losses and optimal tokens are of the second layer on (L′ = L − 1 layers).

    Attributes:
        overlap: (S, S) share of tokens in common, at the asked ratio.
        jaccard: (S, S) the same as Jaccard index.
        by_ratio: (S, P) share of the decode-attended tokens that are selected (ProphetKV fig. 3, 4).
        with_optimal: (S, L′) share of each layer's own optimal tokens that are selected (ProphetKV fig. 7).
        layers: (3, L) what each layer's question rows find when they alone choose; rows as LAYER_CURVES.
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


LAYER_CURVES: Mapping[str, str] = MappingProxyType(
    {
        "stale": "over stale KV, among the decode-attended tokens (mean over layers)",
        "full": "under full attention, among the decode-attended tokens (mean over layers)",
        "stale_same": "over stale KV, among the tokens that decoding attends to in the same layer",
    }
)
"""Tokens that one layer's question rows attend to most, and among which others they are looked for."""


def measure(
    full: FullView, stale: StaleView, off: Differences, scored: Mapping[str, Tensor], ratio: float
) -> Measured:
    """Compare two views of one prompt; `scored` as `selection_scores` gives it, `ratio` above 0."""
    context = full.context
    scores = torch.stack(list(scored.values()))  # (S, n)
    count = Budget(ratio).rows(context.tokens)
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


def _counts(tokens: int) -> Sequence[int]:
    return [Budget(ratio).rows(tokens) for ratio in RATIOS]


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
    fused = top_tokens(full.decoding.mean(0), count)
    pairs = ((before, fused), (after, fused), (before, decoding))  # as LAYER_CURVES
    return torch.stack([common_share(chosen, wanted) for chosen, wanted in pairs])  # (3, L)


def _losses(residual: Tensor, scores: Tensor) -> Tensor:
    """Share of the loss left, mean over layers: residual (L′, n), scores (F, L′ or 1, n) → (F, P)."""
    counts = _counts(residual.shape[-1])
    return torch.stack(
        [torch.stack([share_left(residual, ranked, count).mean() for count in counts]) for ranked in scores]
    )


def _tenths(context: Context) -> Tensor:
    return (context.depth * DEPTHS).long().clamp_(max=DEPTHS - 1)


def _shares(amounts: Tensor, places: Tensor, count: int) -> Tensor:
    """Share of amounts (…, n) at each of `count` places: (…, count); zeros where there is nothing."""
    amounts = amounts.double()
    sums = amounts.new_zeros(*amounts.shape[:-1], count).index_add_(-1, places, amounts)
    return sums / sums.sum(-1, keepdim=True).clamp_min(1e-300)
