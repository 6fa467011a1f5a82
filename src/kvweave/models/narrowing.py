"""A pass that goes on with fewer rows from layer to layer (CacheBlend's gradual filtering).

Whatever is handed from layer to layer has one entry per row in its second dimension; before a decoder layer runs,
the entries of dropped rows are taken out. Hooks do that for the length of one pass; the model stays as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest
from kvweave.models.attention import ROWS_KEYWORD, RowPlan
from kvweave.models.canvas import Canvas
from kvweave.models.probe import attention_modules


class Narrowing(Protocol):
    """Decides which rows of a pass go on."""

    def rows_for(self, layer: int) -> Tensor | None:
        """Prompt positions (T,) that this layer computes; asked before each layer, in order.

        Ascending, a subset of the rows still running, the last one among them; None to go on with all of these.
        Dropped rows keep the K,V that the canvas holds for them, from this layer on.
        """
        ...


@contextmanager
def narrowed(model: PreTrainedModel, canvas: Canvas, plan: RowPlan, narrowing: Narrowing) -> Iterator[None]:
    """While active, the pass of this plan runs over the rows that `narrowing` leaves; other calls run as ever.

    Rows that cannot be honoured raise InvalidRequest out of the pass.
    """
    with ExitStack() as hooks:
        cut = _Cut(canvas, plan, narrowing)
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

    def __init__(self, canvas: Canvas, plan: RowPlan, narrowing: Narrowing) -> None:
        self._canvas = canvas
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
            self._canvas.rows = _checked(chosen.to(came.device), came, layer)
            self._running = self._running.narrowed(self._canvas.rows)
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
