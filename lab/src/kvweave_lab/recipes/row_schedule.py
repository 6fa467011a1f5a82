"""Passes that drop rows between layers: which rows each layer computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest
from kvweave.models.attention import ROWS_KEYWORD, RowPlan
from kvweave.models.forward import Arguments, decoder_layers, select_rows
from kvweave.models.fused_cache import FusedCache


class RowSchedule(Protocol):
    """Decides which rows of a pass each layer computes."""

    def rows_for(self, layer: int) -> Tensor | None:
        """Return the prompt positions (T,) that this layer computes; called before each layer, in order.

        They must be ascending, a subset of the rows still running, and include the last of these. None keeps all of
        these. From this layer on, a dropped row keeps the K,V that the cache holds for it.
        """
        ...


def scheduled(plan: RowPlan, kv_cache: FusedCache, schedule: RowSchedule) -> RowPlan:
    """Have the pass of this plan over this cache run each layer over the rows that `schedule` keeps; return the plan.

    Other calls of the model are not affected. The pass raises InvalidRequest for rows that the schedule may not choose.
    """
    plan.around = partial(_dropping, kv_cache, schedule)  # the plan in it would be a cycle
    return plan


@contextmanager
def _dropping(
    kv_cache: FusedCache, schedule: RowSchedule, model: PreTrainedModel, plan: RowPlan
) -> Iterator[None]:
    with ExitStack() as hooks:
        dropper = _RowDropper(kv_cache, plan, schedule)
        for layer, module in enumerate(decoder_layers(model)):
            before = partial(dropper.before_layer, layer)
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


class _RowDropper:
    """The pre-hooks of one scheduled pass; they share the rows that still run, and how these attend."""

    def __init__(self, kv_cache: FusedCache, plan: RowPlan, schedule: RowSchedule) -> None:
        self._kv_cache = kv_cache
        self._schedule = schedule
        self._first = self._running = plan

    def before_layer(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Drop rows from a decoder layer's arguments."""
        if kwargs.get(ROWS_KEYWORD) is not self._first:
            return args, kwargs
        before = self._running.rows
        chosen = self._schedule.rows_for(layer)
        if chosen is not None:
            self._running = self._running.subset(_checked(chosen.to(before.device), before, layer))
            self._kv_cache.write_only(self._running.rows)
        # Hidden states come from the layer before and have lost the rows dropped so far. What the model made
        # once for all layers (angles, position ids) still has every row that the pass began with.
        rows = self._running.rows
        indices = {full.numel(): torch.searchsorted(full, rows) for full in (self._first.rows, before)}
        kept = {name: select_rows(value, indices) for name, value in kwargs.items()}
        return select_rows(args, indices), {**kept, ROWS_KEYWORD: self._running}


def _checked(chosen: Tensor, running: Tensor, layer: int) -> Tensor:
    ascending = chosen.numel() > 0 and bool((chosen[1:] > chosen[:-1]).all())
    if not ascending or not torch.isin(chosen, running).all() or chosen[-1] != running[-1]:
        raise InvalidRequest(
            f"layer {layer} cannot continue with {chosen.numel()} of {running.numel()} rows: they must be ascending, "
            "be among the rows still running, and include the last of these"
        )
    return chosen
