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
    AttentionInput,
    apply_softcap,
    masked_logits,
    rows_per_block,
    visible_keys,
    without_skipped,
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
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Do what `attend_grouped_reference` defines, over keys and values (B, G, S, D) in prompt order from position 0.

    Writes logits out, block by block of rows: meant for a question's rows, not for a prompt's. Returns
    (B, H, T, D).
    """
    batch, heads, count, width = query.shape
    block = rows_per_block(batch, heads, keys.shape[2], keys.device)
    parts = [query[:, :, :0]]
    for start in range(0, count, block):
        q = query[:, :, start : start + block]
        visible = visible_keys(rows[start : start + block], 0, keys.shape[2], window)
        logits = masked_logits(q, keys, visible, scaling=scaling, softcap=softcap)
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


def attend_grouped_reference(
    query: Tensor,
    rows: Tensor,
    source: AttentionInput,
    group: ContextGroup,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Two softmaxes and their merge in float32, straight from the definition (APE).

    Arguments, visibility and the result (B, H, T, D) are as in `attend_reference`. Every row must see itself.
    """
    stored = without_skipped(source)
    heads = query.shape[1] // stored.keys.shape[1]
    keys, values = (x.float().repeat_interleave(heads, dim=1) for x in (stored.keys, stored.values))
    logits = apply_softcap(query.float() @ keys.transpose(2, 3) * scaling, softcap)  # (B, H, T, S)
    visible = stored.positions[None, :] <= rows[:, None]  # (T, S)
    if window is not None:
        visible &= stored.positions[None, :] > rows[:, None] - window
    context = (stored.positions >= group.first) & (stored.positions < group.end)  # (S,)

    outputs, masses = [], []
    for members, temperature, scale in (
        (context, group.temperature, group.scale * group.temperature),
        (~context, 1.0, 1.0),
    ):
        own = (logits / temperature).masked_fill(~(visible & members), float("-inf"))
        weights = own.softmax(dim=-1).nan_to_num(0.0)  # zeros where a row sees none of the group
        outputs.append(weights @ values)
        masses.append(own.logsumexp(dim=-1) * scale)  # (B, H, T)
    shares = torch.stack(masses).softmax(dim=0)[..., None]
    return (shares[0] * outputs[0] + shares[1] * outputs[1]).to(query.dtype)
