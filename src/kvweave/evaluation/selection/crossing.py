"""Scores carried from one tokenizer's tokens to another's, through the characters they stand for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.models.template import SEPARATOR

Offsets = Sequence[tuple[int, int]]
"""The first character of each token and the one after its last."""


def context_offsets(adapter: Adapter, chunks: Sequence[str]) -> list[tuple[int, int]] | None:
    """Characters of every context token, counted through all chunks and the separators behind them.

    None if the tokenizer cannot tell, or tells of other tokens than the prompt has: text that looks like a
    control token is cut up in prompts.
    """
    offsets: list[tuple[int, int]] = []
    base = 0
    for text in chunks:
        found = _chunk_offsets(adapter, text)
        if found is None:
            return None
        offsets += [(base + start, base + end) for start, end in found]
        base += len(text) + len(SEPARATOR)
    return offsets


def _chunk_offsets(adapter: Adapter, text: str) -> list[tuple[int, int]] | None:
    if not getattr(adapter.tokenizer, "is_fast", False):
        return None
    own, separator = _encoded(adapter, text), _encoded(adapter, SEPARATOR)
    if (*own["input_ids"], *separator["input_ids"]) != adapter.template.chunk_ids(text):
        return None
    behind = len(text)
    return [
        *own["offset_mapping"],
        *((behind + start, behind + end) for start, end in separator["offset_mapping"]),
    ]


def _encoded(adapter: Adapter, text: str) -> Any:
    return adapter.tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )


def carry(scores: Tensor, source: Offsets, target: Offsets, characters: int) -> Tensor:
    """Scores of tokens at `source` offsets as scores of the tokens at `target` offsets of the same text.

    A token's score is shared out evenly over its characters; a character's is shared out evenly over the
    target tokens that stand for it (several do where a character takes several bytes). (source,) → (target,),
    float64 on the CPU; the sum stays the same where both sides cover every character.
    """
    from_start, from_end = _bounds(source, characters)
    density = scores.double().cpu() / (from_end - from_start)
    by_character = _sum_over(density, from_start, from_end, characters)
    to_start, to_end = _bounds(target, characters)
    covers = _sum_over(torch.ones(len(to_start), dtype=torch.float64), to_start, to_end, characters)
    shared = by_character / covers.clamp_min(1.0)
    before = torch.cat([shared.new_zeros(1), shared.cumsum(0)])
    return (before[to_end] - before[to_start]).clamp_min(0.0)


def _bounds(offsets: Offsets, characters: int) -> tuple[Tensor, Tensor]:
    start, end = torch.tensor(offsets, dtype=torch.long).reshape(-1, 2).unbind(-1)
    start = start.clamp(max=characters - 1)
    return start, torch.maximum(
        end, start + 1
    )  # a token that stands for no character counts with the next one


def _sum_over(amounts: Tensor, start: Tensor, end: Tensor, characters: int) -> Tensor:
    """For every character the sum of the amounts whose range holds it."""
    steps = torch.zeros(characters + 1, dtype=torch.float64)
    steps.index_add_(0, start, amounts).index_add_(0, end, -amounts)
    return steps.cumsum(0)[:-1].clamp_min(0.0)
