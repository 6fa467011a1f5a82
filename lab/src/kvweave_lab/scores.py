"""Scores of tokens that evaluations and training compute and no recipe of the product does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.models.prompt import SEPARATOR, PromptTemplate
from kvweave.ops.scores import Offsets


def residual_norms(weights: Tensor, values: Tensor, stale_weights: Tensor, stale_values: Tensor) -> Tensor:
    """Return each token's share of the bound on the attention output's error if it stays stale (ProphetKV eq. 5).

    Takes attention weights (n,) averaged over rows and heads, and values (G, n, D), each under full attention and over
    stale KV. Returns ‖Φ V − Φ′ V′‖₂ over all heads and dims, (n,), float32.
    """
    difference = (
        weights[:, None] * values.float() - stale_weights[:, None] * stale_values.float()
    )  # (G, n, D)
    return difference.square().sum(dim=(0, 2)).sqrt()


def kv_deviation(full: Tensor, stale: Tensor) -> Tensor:
    """Return the squared distance of each token's stale keys or values from full attention's (FusionRAG eq. 7).

    Both are (G, n, D), at the same positions; rotation makes no difference. Returns (n,), float32.
    """
    return (full.float() - stale.float()).square().sum(dim=(0, 2))


def context_offsets(template: PromptTemplate, chunks: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the `chunk_offsets` of a prompt's chunks, counted through all of them and their separators."""
    offsets: list[tuple[int, int]] = []
    before = 0
    for text in chunks:
        found = template.chunk_offsets(text)
        if found is None:
            return None
        offsets += [(before + start, before + end) for start, end in found]
        before += len(text) + len(SEPARATOR)
    return offsets


def transfer_scores(scores: Tensor, source: Offsets, target: Offsets, characters: int) -> Tensor:
    """Transfer the scores of tokens at `source` offsets to the tokens at `target` offsets of the same text.

    A token's score is split evenly over its characters. A character's score is split evenly over the
    target tokens that contain it (several, if it takes several bytes). (source,) → (target,),
    float64 on the CPU; the sum stays the same where both sides cover every character.
    """
    from_start, from_end = _bounds(source, characters)
    density = scores.double().cpu() / (from_end - from_start)
    by_character = _sum_over(density, from_start, from_end, characters)
    to_start, to_end = _bounds(target, characters)
    covers = _sum_over(torch.ones(len(to_start), dtype=torch.float64), to_start, to_end, characters)
    per_token = by_character / covers.clamp_min(1.0)
    before = torch.cat([per_token.new_zeros(1), per_token.cumsum(0)])
    return (before[to_end] - before[to_start]).clamp_min(0.0)


def _bounds(offsets: Offsets, characters: int) -> tuple[Tensor, Tensor]:
    start, end = torch.tensor(offsets, dtype=torch.long).reshape(-1, 2).unbind(-1)
    start = start.clamp(max=characters - 1)
    return start, torch.maximum(end, start + 1)  # a token without characters counts with the next one


def _sum_over(amounts: Tensor, start: Tensor, end: Tensor, characters: int) -> Tensor:
    """Return for every character the sum of the amounts whose range contains it."""
    steps = torch.zeros(characters + 1, dtype=torch.float64)
    steps.index_add_(0, start, amounts).index_add_(0, end, -amounts)
    return steps.cumsum(0)[:-1].clamp_min(0.0)
