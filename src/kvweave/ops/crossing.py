"""Values of one tokenizer's tokens as values of another's, through the characters of the text that both stand for."""

from collections.abc import Sequence

import torch
from torch import Tensor

Offsets = Sequence[tuple[int, int]]
"""The first character of each token and the one after its last."""


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


def lowest(values: Tensor, source: Offsets, target: Offsets, characters: int, otherwise: int) -> Tensor:
    """For each target token the lowest value of the source tokens that it shares a character with.

    Integers (source,) → (target,), int64 on the CPU; `otherwise`, which is above all values, where it shares none.
    """
    by_character = torch.full((characters,), otherwise)
    owner, place = _characters_of(source, characters)
    by_character.scatter_reduce_(0, place, values[owner], "amin")
    owner, place = _characters_of(target, characters)
    return torch.full((len(target),), otherwise).scatter_reduce_(0, owner, by_character[place], "amin")


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


def _characters_of(offsets: Offsets, characters: int) -> tuple[Tensor, Tensor]:
    """Every character of every token: which token, and which character."""
    start, end = _bounds(offsets, characters)
    lengths = end - start
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return owner, start[owner] + torch.arange(len(owner)) - first[owner]
