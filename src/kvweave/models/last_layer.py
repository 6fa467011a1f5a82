"""The last layer of a pass: keys and values of every row, and nothing more but of the last row, whose logits are asked for.

Nothing reads what the last layer makes of the other rows, so that its attention, its output projection and its
feed-forward network are left out for them. Before the layer runs, a hook runs it up to its attention with all rows, which
puts their keys and values into the canvas and shows them to whoever watches, and then lets it go on with the last row.
The model stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.models.attention import ROWS_KEYWORD, AttentionCall, LayerQueries, RowPlan
from kvweave.models.canvas import Canvas
from kvweave.models.narrowing import decoder_layers, entries_of
from kvweave.models.updates import PassOver


@dataclass(frozen=True, slots=True)
class EndAt:
    """Watches a pass and ends it at a layer, when those that watch before it have seen the layer's attention.

    The layer's keys and values are in the canvas by then.
    """

    layer: int

    def see(self, queries: LayerQueries) -> None:
        """Called layer by layer."""
        if queries.layer == self.layer:
            raise PassOver


@contextmanager
def last_row_only(model: PreTrainedModel, canvas: Canvas) -> Iterator[None]:
    """While active, the pass that writes to this canvas computes of the last layer what is needed; other calls run as ever."""

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        plan = kwargs.get(ROWS_KEYWORD)
        if not isinstance(plan, RowPlan) or plan.rows.numel() < 2:
            return args, kwargs
        with suppress(_Seen):
            module.forward(*args, **{**kwargs, ROWS_KEYWORD: _ShownOnly(plan)})
        last = plan.narrowed(plan.rows[-1:])
        last.watches = []  # they have seen all rows
        canvas.write_again(last.rows)
        place = {plan.rows.numel(): torch.tensor([plan.rows.numel() - 1], device=plan.rows.device)}
        cut = {name: entries_of(value, place) for name, value in kwargs.items()}
        return entries_of(args, place), {**cut, ROWS_KEYWORD: last}

    hook = decoder_layers(model)[-1].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class _Seen(Exception):
    """Ends a layer at its attention, when its keys and values are in the canvas."""


class _ShownOnly:
    """A plan that attends to nothing: whoever watches it sees the layer."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan

    def attend(self, call: AttentionCall) -> Tensor:
        """Show the layer, and end it."""
        self._plan.show(call)
        raise _Seen
