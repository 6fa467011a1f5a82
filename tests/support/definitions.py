"""What fast functions of `kvweave.ops` compute, written out as their definitions say it: slow, for comparison."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, apply_softcap, split_packed
from kvweave.ops.grouped_attention import ContextGroup
from kvweave.ops.quantise import QuantisedKV


def attend_reference(
    query: Tensor,
    rows: Tensor,
    source: AttentionInput,
    settings: AttentionSettings,
) -> Tensor:
    """Softmax attention in float32, straight from the definition (FusionRAG §4.3, Q-Sparse-Attn).

    Query (B, H, T, D) is at prompt positions `rows` (T,). Row t sees every key at a position ≤ t that is not
    skipped and, with a sliding `window`, at a position > t − window. Returns (B, H, T, D) in the query's dtype.
    """
    stored = without_skipped(source)
    keys, values, positions = stored.keys, stored.values, stored.positions
    visible = positions[None, :] <= rows[:, None]  # (T, S)
    if settings.window is not None:
        visible &= positions[None, :] > rows[:, None] - settings.window
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (keys, values))  # (B, H, S, D)
    logits = apply_softcap(
        query.float() @ keys.transpose(2, 3) * settings.scaling, settings.softcap
    )  # (B, H, T, S)
    weights = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values).to(query.dtype)


class ReferenceAttention:
    """`attend_reference`, request by request: slow, for comparison."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        parts = zip(split_packed(query, self._rows), self._rows, sources, strict=True)
        return torch.cat(
            [attend_reference(q, rows, own, settings) for q, rows, own in parts],
            dim=2,
        )


def without_skipped(source: AttentionInput) -> KVRows:
    """Return every row that may be seen, shared ones first, without the skipped ones; new tensors."""
    kept = [~torch.isin(span.positions, source.skip) for span in source.shared]
    spans = [
        *zip(source.shared, kept, strict=True),
        (source.private, torch.ones_like(source.private.positions) > 0),
    ]
    return KVRows(
        keys=torch.cat([span.keys[:, :, keep] for span, keep in spans], dim=2),  # (B, G, S, D)
        values=torch.cat([span.values[:, :, keep] for span, keep in spans], dim=2),
        positions=torch.cat([span.positions[keep] for span, keep in spans]),
    )


def attend_grouped_reference(
    query: Tensor,
    rows: Tensor,
    source: AttentionInput,
    group: ContextGroup,
    settings: AttentionSettings,
) -> Tensor:
    """Two softmaxes and their merge in float32, straight from the definition (APE).

    Arguments, visibility and the result (B, H, T, D) are as in `attend_reference`. Every row must see itself.
    """
    stored = without_skipped(source)
    heads = query.shape[1] // stored.keys.shape[1]
    keys, values = (x.float().repeat_interleave(heads, dim=1) for x in (stored.keys, stored.values))
    logits = apply_softcap(
        query.float() @ keys.transpose(2, 3) * settings.scaling, settings.softcap
    )  # (B, H, T, S)
    visible = stored.positions[None, :] <= rows[:, None]  # (T, S)
    if settings.window is not None:
        visible &= stored.positions[None, :] > rows[:, None] - settings.window
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


def dequantise_reference(packed: QuantisedKV, layer: int) -> Tensor:
    """Decode one layer, (2, G, S, D), number by number from the definition: the reference for `QuantisedKV.layer`."""
    decoded = torch.empty(packed.shape[1:], dtype=packed.dtype)
    half = packed.codes.shape[-1]
    for part, head, token, channel in torch.cartesian_prod(*map(torch.arange, decoded.shape)).tolist():
        code = int(packed.codes[layer, part, head, token, channel % half])
        if packed.storage == "int4":
            code = code >> 4 if channel >= half else code & 15
        low, step = (
            (packed.key_low[layer, head, 0, channel], packed.key_step[layer, head, 0, channel])
            if part == 0
            else (packed.value_low[layer, head, token, 0], packed.value_step[layer, head, token, 0])
        )
        decoded[part, head, token, channel] = low.double() + code * step.double()
    for index, token in enumerate(packed.outlier_tokens[layer].tolist()):
        decoded[:, :, token] = packed.outlier_rows[layer, :, :, index]
    return decoded
