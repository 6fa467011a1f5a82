"""Our attention function, registered with transformers under one name.

A pass over chosen rows carries a plan as a keyword of the model call; attention then goes by it and
ignores masks. Whoever wants to see what the rows attend to watches the plan. Any other call (an ordinary
`generate` on the fused cache) takes the library's own path.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvweave.errors import UnsupportedModel
from kvweave.models.rotary import RotationWatch
from kvweave.ops.attention import AttentionInput, KeyRows, RowAttention
from kvweave.ops.grouped_attention import ContextGroup, attend_grouped
from kvweave.ops.row_attention import row_attention
from kvweave.ops.row_blocks import attend_softcap

ATTENTION_NAME = "kvweave"
ROWS_KEYWORD = "kvweave_rows"
ROTATIONS_KEYWORD = "kvweave_rotations"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention as the model asks for it.

    `query` (B, H, T, D) belongs to the rows of a pass, `keys` and `values` (B, G, N, D) are what its cache
    returned, in prompt order. `window` and `softcap` are the layer's own, None where it has none. `unrotated` is
    the query before rotary positions were applied, None unless the pass was asked for it.
    """

    layer: int
    query: Tensor
    keys: Tensor
    values: Tensor
    window: int | None
    scaling: float
    softcap: float | None
    unrotated: Tensor | None = None


class AttentionPlan(Protocol):
    """What a pass carries through the model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention output of one layer, (B, H, T, D)."""
        ...


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """What one layer's attention weights are made of: rotated queries and keys, to be read only.

    `query` (B, H, T, D) belongs to prompt positions `rows` (T,), ascending; `keys` (B, G, N, D) stand in prompt
    order. `window` and `softcap` are the layer's own, None where it has none. `unrotated` is the query before
    rotary positions were applied, whole heads; None unless a watch of the pass wants it.
    """

    layer: int
    rows: Tensor
    query: Tensor
    keys: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    unrotated: Tensor | None = None


class AttentionHook(Protocol):
    """Something that looks at what the rows of a pass attend to, layer by layer, without changing it.

    One with an attribute `wants_unrotated` that is true is shown queries before rotation too.
    """

    def see(self, queries: LayerQueries) -> None:
        """Called once per layer, in order, before the layer's output is made; may raise StopForward to end a look."""
        ...


class RowPlan:
    """Plain causal attention of the prompt positions that a pass computes, `rows` (T,), ascending.

    `hooks` see every layer of the pass; add to them before it runs.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        self.rows = rows
        self.hooks: list[AttentionHook] = []
        self.layers_seen: set[int] = set()
        self._dtype = dtype
        self._attention: RowAttention | None = None

    @property
    def wants_unrotated(self) -> bool:
        """Whether a watch wants to see queries before rotation."""
        return any(getattr(hook, "wants_unrotated", False) for hook in self.hooks)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (B, H, T, D) over the canvas' keys and values (B, G, N, D)."""
        self.show(call)
        return self._attend_plainly(call, self.rows)

    def narrowed(self, rows: Tensor) -> Self:
        """The same plan, watches included, for some of its rows."""
        smaller = copy(self)
        smaller.rows, smaller._attention = rows, None
        return smaller

    def show(self, call: AttentionCall) -> None:
        """Let those who watch see a layer."""
        self.layers_seen.add(call.layer)
        for hook in self.hooks:
            hook.see(
                LayerQueries(
                    layer=call.layer,
                    rows=self.rows,
                    query=call.query,
                    keys=call.keys,
                    scaling=call.scaling,
                    window=call.window,
                    softcap=call.softcap,
                    unrotated=call.unrotated,
                )
            )

    def _attend_plainly(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """Of the same rows at every layer."""
        if self._attention is None:
            self._attention = row_attention([rows], self._dtype)
        # The canvas has merged shared spans and rows already: one private run in prompt order, nothing to skip.
        whole = KeyRows(call.keys, call.values, torch.arange(call.keys.shape[2], device=call.keys.device))
        given = AttentionInput(shared=(), private=whole, skip=rows[:0])
        return self._attention.attend(
            call.query, [given], scaling=call.scaling, window=call.window, softcap=call.softcap
        )


def register() -> None:
    """Make the name known to transformers; doing it again changes nothing.

    The mask function is the library's own: without one, a padded batch would be attended to unmasked.
    """
    AttentionInterface.register(ATTENTION_NAME, row_attention_function)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def row_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (B, H, T, D), key and value (B, G, S, D) → (B, T, H, D)."""
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} uses learned attention sinks, which kvweave cannot fuse yet"
        )
    plan: AttentionPlan | None = kwargs.get(ROWS_KEYWORD)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if plan is not None:
        rotations: RotationWatch | None = kwargs.get(ROTATIONS_KEYWORD)
        unrotated = rotations.query_before(query) if rotations is not None else None
        layer = int(getattr(module, "layer_idx", -1))
        out = plan.attend(AttentionCall(layer, query, key, value, sliding_window, scale, softcap, unrotated))
    elif softcap is not None:
        # A missing mask means plain causal attention, as it does for the library's own function.
        causal = attention_mask is None and query.shape[2] > 1
        out = attend_softcap(query, key, value, attention_mask, causal, scale, softcap)
    else:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return out.transpose(1, 2).contiguous(), None


class GroupedPlan(RowPlan):
    """Rows (T,) behind the context attend to it in a group of its own, rows before its end as the model would.

    `columns` (first, end) are the context's prompt positions. Its logits are divided by `temperature`, the log of
    what they sum to is multiplied by `scale` · `temperature`, and the result is merged with attention to
    everything else. Sliding windows count rows of the canvas, as the library's masks do. Raises InvalidRequest
    for a temperature or scale that is not above 0.
    """

    def __init__(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        *,
        columns: tuple[int, int],
        temperature: float = 0.9,
        scale: float = 0.9,
    ) -> None:
        super().__init__(rows, dtype)
        self._group = ContextGroup(*columns, temperature, scale)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (B, H, T, D) over the canvas' keys and values (B, G, N, D)."""
        self.show(call)
        inside = int((self.rows < self._group.end).sum())
        behind = attend_grouped(
            call.query[:, :, inside:],
            self.rows[inside:],
            call.keys,
            call.values,
            self._group,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
        )
        if inside == 0:
            return behind
        before = self._attend_plainly(replace(call, query=call.query[:, :, :inside]), self.rows[:inside])
        return torch.cat([before, behind], dim=2)
