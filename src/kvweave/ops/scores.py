"""Scores of context tokens: how much rows attend to them, how far their KV deviates.

Selectors rank tokens by these. Nothing here knows models, prompts or recipes.

Tensor letters: B batch, H query heads, G KV heads, R query rows, S keys, D head width, n tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionSettings, masked_logits, rows_per_block, visible_keys


def mean_attention(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    settings: AttentionSettings,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """Return the softmax weights of query rows on keys, averaged over rows and heads.

    Query (B, H, R, D) is at prompt positions `rows` (R,), keys (B, G, S, D) at 0 … S − 1; visibility is that of
    `RowAttention`. With `columns` (first, end) the softmax runs over those keys
    alone; a row that sees none of them counts as zeros. Logits are made in the query's dtype, as attention
    makes them, and the softmax in float32. Returns (B, end − first), float32.
    """
    first, end = columns or (0, keys.shape[2])
    batch, heads, count, _ = query.shape
    total = torch.zeros(batch, end - first, device=keys.device)
    for weights in _weights(query, rows, keys, settings, (first, end)):
        total += weights.sum(dim=(1, 2))
    return total / max(1, heads * count)


def peak_attention(query: Tensor, rows: Tensor, keys: Tensor, settings: AttentionSettings) -> Tensor:
    """Return the largest softmax weight of any query row and head on each key, (B, S), float32; else as `mean_attention`."""
    peak = torch.zeros(query.shape[0], keys.shape[2], device=keys.device)
    for weights in _weights(query, rows, keys, settings, (0, keys.shape[2])):
        peak = torch.maximum(peak, weights.amax(dim=(1, 2)))
    return peak


def attention_shares(
    query: Tensor, rows: Tensor, keys: Tensor, parts: Tensor, settings: AttentionSettings
) -> Tensor:
    """Return the share of each query row's attention on parts of the keys, averaged over heads; else as `mean_attention`.

    `parts` (S, P) is 1 where a key belongs to a part. Returns (B, R, P), float32.
    """
    shares = [torch.zeros(query.shape[0], 0, parts.shape[1], device=keys.device)]
    for weights in _weights(query, rows, keys, settings, (0, keys.shape[2])):
        shares.append(weights.mean(dim=1) @ parts.float())  # (B, rows, P)
    return torch.cat(shares, dim=1)


def _weights(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    settings: AttentionSettings,
    columns: tuple[int, int],
) -> Iterator[Tensor]:
    """Yield softmax weights (B, H, rows, end − first) of blocks of rows, in order; zeros for a row that sees no key."""
    first, end = columns
    batch, heads, count, _ = query.shape
    block = rows_per_block(batch, heads, end - first, keys.device)
    for start in range(0, count, block):
        visible = visible_keys(rows[start : start + block], first, end, settings.window)  # (rows, keys)
        q = query[:, :, start : start + block]
        logits = masked_logits(q, keys[:, :, first:end], visible, settings)
        weights = logits.softmax(dim=-1)
        blind = ~visible.any(dim=-1, keepdim=True)  # (rows, 1)
        if not blind.is_cpu or bool(blind.any()):
            weights = weights.masked_fill_(blind, 0.0)
        yield weights


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` tokens with the highest scores: bool like `scores` (…, n); ties go to the first."""
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)


Offsets = Sequence[tuple[int, int]]
"""The first character of each token and the one after its last, in one text."""


def transfer_lowest(
    values: Tensor, source: Offsets, target: Offsets, characters: int, otherwise: int
) -> Tensor:
    """Return for each target token the lowest value of the source tokens that it shares a character with.

    Integers (source,) → (target,), int64 on the CPU. A token that shares no character gets `otherwise`, which must be
    above all values.
    """
    by_character = torch.full((characters,), otherwise)
    token, character = _characters_of(source, characters)
    by_character.scatter_reduce_(0, character, values[token], "amin")
    token, character = _characters_of(target, characters)
    return torch.full((len(target),), otherwise).scatter_reduce_(0, token, by_character[character], "amin")


def _characters_of(offsets: Offsets, characters: int) -> tuple[Tensor, Tensor]:
    """Return every (token, character) pair, token by token: the tokens, and the characters."""
    start, end = torch.tensor(offsets, dtype=torch.long).reshape(-1, 2).unbind(-1)
    start = start.clamp(max=characters - 1)
    lengths = torch.maximum(end, start + 1) - start  # a token without characters counts with the next one
    token = torch.arange(len(lengths)).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return token, start[token] + torch.arange(len(token)) - first[token]


def windowed_ranks(scores: Tensor, lengths: Sequence[int], *, window: int, more_than: int) -> Tensor:
    """Return the number of highest-scoring tokens to select before each token is kept (CacheClip §3.3).

    Each run of `lengths` tokens is cut into windows of `window`; its last window may be shorter. A window keeps its
    selected tokens if more than `more_than` of them are selected, which is below `window`. So if the k tokens with the
    highest scores (n,) are selected, ties to the first, the kept ones are those whose rank here is at most k.

    Returns:
        (n,) int64: 1 … n; above n where a window is too short ever to be kept, in the order of the scores.
    """
    count = scores.numel()
    rank = torch.empty(count, dtype=torch.long)
    rank[scores.argsort(descending=True, stable=True)] = torch.arange(1, count + 1)
    if not count:
        return rank
    tokens, real = _windows(lengths, window)
    never = count + 1
    ranks = rank[tokens].masked_fill(~real, never)  # (windows, window)
    enough = ranks.sort(dim=1).values[:, more_than, None]  # the smallest selection with enough of the window
    kept = torch.where(enough == never, count + ranks, ranks.maximum(enough))
    return torch.empty_like(rank).scatter_(0, tokens[real], kept[real])


def _windows(lengths: Sequence[int], window: int) -> tuple[Tensor, Tensor]:
    """Return token numbers of all windows, (windows, window), and which are real; the others repeat the last one."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    pieces = (sizes + window - 1) // window
    run = torch.arange(len(sizes)).repeat_interleave(pieces)
    number = torch.arange(len(run)) - (pieces.cumsum(0) - pieces)[run]  # of the window in its run
    first = (ends - sizes)[run] + number * window
    tokens = first[:, None] + torch.arange(window)
    last = ends[run, None] - 1
    return tokens.minimum(last), tokens <= last
