"""Attention in two groups: the context's keys under a softmax of their own, merged with that over all other keys (APE).

Chunks that were prefilled separately draw more attention together than one text of their length would. A temperature
sharpens the context's softmax, and a scale lowers its weight against the rest.

Tensor letters: B batch, H query heads, G KV heads, T query rows, S keys, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.ops.attention import (
    AttentionSettings,
    masked_logits,
    rows_per_block,
    visible_keys,
)


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The keys at prompt positions `first` … `end` − 1 as a group of their own.

    Their logits are divided by `temperature`; the log of their exponentials' sum is multiplied by
    `scale` · `temperature`. At 1 and 1 the group makes no difference. Raises InvalidRequest for a temperature or
    scale that is not above 0, and for columns that end before they begin.
    """

    first: int
    end: int
    temperature: float
    scale: float

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end:
            raise InvalidRequest(
                f"the context goes from {self.first} to {self.end}; it must not end before its start"
            )
        if self.temperature <= 0 or self.scale <= 0:
            raise InvalidRequest(
                f"temperature is {self.temperature} and scale {self.scale}; both must be above 0 (1: no difference)"
            )


def attend_grouped(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    group: ContextGroup,
    settings: AttentionSettings,
) -> Tensor:
    """Attend to the group and to all other keys, each by its own softmax, and merge both (APE).

    Query (B, H, T, D) is at prompt positions `rows` (T,), keys and values (B, G, S, D) in prompt order from position 0. Writes logits out, block by block of rows: meant for a question's rows, not for a prompt's. Returns
    (B, H, T, D).
    """
    batch, heads, count, width = query.shape
    block = rows_per_block(batch, heads, keys.shape[2], keys.device)
    parts = [query[:, :, :0]]
    for start in range(0, count, block):
        q = query[:, :, start : start + block]
        visible = visible_keys(rows[start : start + block], 0, keys.shape[2], settings.window)
        logits = masked_logits(q, keys, visible, settings)
        weights = _merge_groups(logits, group).softmax(dim=-1).to(query.dtype)
        folded = weights.reshape(batch, keys.shape[1], -1, keys.shape[2]) @ values  # (B, G, H/G · rows, D)
        parts.append(folded.reshape(batch, heads, -1, width))
    return torch.cat(parts, dim=2)


def _merge_groups(logits: Tensor, group: ContextGroup) -> Tensor:
    """Change logits (B, H, T, S) in place, so that one softmax over all keys gives the merge of both groups.

    A group's weights depend on its logits up to a constant only. The constant is chosen so that the weights sum to the
    mass that the definition gives the group.
    """
    context = logits[..., group.first : group.end]
    context /= group.temperature
    mass = context.logsumexp(dim=-1, keepdim=True)
    context += torch.where(mass.isfinite(), (group.scale * group.temperature - 1) * mass, 0.0)
    return logits
