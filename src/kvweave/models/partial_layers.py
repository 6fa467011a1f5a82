"""The last layer of a pass: keys and values of every row, and nothing more but of the last row, whose logits are asked for.

Nothing reads what the last layer makes of the other rows, so that its attention, its output projection and its
feed-forward network are left out for them. Before the layer runs, a hook runs it up to its attention with all rows, which
puts their keys and values into the canvas and shows them to whoever watches, and then lets it go on with the last row.
The model stays as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest
from kvweave.models.attention import ROWS_KEYWORD, AttentionCall, LayerQueries, RowPlan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.support import attention_modules
from kvweave.models.updates import StopForward


class RowSchedule(Protocol):
    """Decides which rows of a pass go on."""

    def rows_for(self, layer: int) -> Tensor | None:
        """Prompt positions (T,) that this layer computes; asked before each layer, in order.

        Ascending, a subset of the rows still running, the last one among them; None to go on with all of these.
        Dropped rows keep the K,V that the canvas holds for them, from this layer on.
        """
        ...


@contextmanager
def narrowed(
    model: PreTrainedModel, kv_cache: FusedCache, plan: RowPlan, narrowing: RowSchedule
) -> Iterator[None]:
    """While active, the pass of this plan runs over the rows that `narrowing` leaves; other calls run as ever.

    Rows that cannot be honoured raise InvalidRequest out of the pass.
    """
    with ExitStack() as hooks:
        cut = _Cut(kv_cache, plan, narrowing)
        for layer, module in enumerate(decoder_layers(model)):
            before = partial(cut.before, layer)
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """A model's layers: the list elements that hold the attention modules, in order."""
    found: dict[int, nn.Module] = {}
    for name, attention in attention_modules(model).items():
        path = name.split(".")
        while not path[-1].isdigit():
            path.pop()
        found[int(attention.layer_idx)] = model.get_submodule(".".join(path))  # type: ignore[arg-type]
    return [found[layer] for layer in sorted(found)]


class _Cut:
    """What the hooks of one pass share: the rows that still run, and how they attend."""

    def __init__(self, kv_cache: FusedCache, plan: RowPlan, narrowing: RowSchedule) -> None:
        self._kv_cache = kv_cache
        self._narrowing = narrowing
        self._begun = self._running = plan

    def before(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Drop rows from a decoder layer's arguments."""
        if kwargs.get(ROWS_KEYWORD) is not self._begun:
            return args, kwargs
        came = self._running.rows
        chosen = self._narrowing.rows_for(layer)
        if chosen is not None:
            self._kv_cache.rows = _checked(chosen.to(came.device), came, layer)
            self._running = self._running.narrowed(self._kv_cache.rows)
        # Hidden states come from the layer before, so they have lost what was dropped until then; what the model
        # made once for all layers (angles, position ids) still has every row that the pass began with.
        rows = self._running.rows
        places = {full.numel(): torch.searchsorted(full, rows) for full in (self._begun.rows, came)}
        cut = {name: entries_of(value, places) for name, value in kwargs.items()}
        return entries_of(args, places), {**cut, ROWS_KEYWORD: self._running}


def entries_of(value: Any, places: dict[int, Tensor]) -> Any:
    """What is handed to a layer, with the entries at some places alone.

    `places` says, by how many rows a tensor has entries for in its second dimension, which of them stay; others, and
    tuples of them, come back as they are.
    """
    if isinstance(value, tuple):
        return tuple(entries_of(each, places) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] in places:
        return value.index_select(1, places[value.shape[1]])
    return value


def _checked(chosen: Tensor, running: Tensor, layer: int) -> Tensor:
    ascending = chosen.numel() > 0 and bool((chosen[1:] > chosen[:-1]).all())
    if not ascending or not torch.isin(chosen, running).all() or chosen[-1] != running[-1]:
        raise InvalidRequest(
            f"layer {layer} cannot go on with {chosen.numel()} of {running.numel()} rows: they must be ascending, "
            "be among the rows still running, and include the last of these"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class StopAtLayer:
    """Watches a pass and ends it at a layer, when those that watch before it have seen the layer's attention.

    The layer's keys and values are in the canvas by then.
    """

    layer: int

    def see(self, queries: LayerQueries) -> None:
        """Called layer by layer."""
        if queries.layer == self.layer:
            raise StopForward


@contextmanager
def last_row_only(model: PreTrainedModel, kv_cache: FusedCache) -> Iterator[None]:
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
        last.hooks = []  # they have seen all rows
        kv_cache.write_again(last.rows)
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
