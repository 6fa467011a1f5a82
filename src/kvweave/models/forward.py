"""How layers of an unmodified model run: the last one over its last row alone, and all of them fast over few rows.

`last_row_only` drops all but the last row inside the last layer: no later layer reads the other rows' output there, so their
attention, output projection and feed-forward network are skipped. The caller makes sure that one such pass runs at a time.

`FewRowsLinear` is for steps of several requests and for drafts: on CPUs, PyTorch multiplies 2 to 64 rows by a weight in up to
three times the time that the weight by the rows, transposed, takes (`lab/experiments/few_rows.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest, ModelError
from kvweave.models.attention import (
    ROWS_KEYWORD,
    AttentionCall,
    RowPlan,
    attention_modules,
)
from kvweave.models.cache_base import AppendableCache
from kvweave.models.fused_cache import FusedCache
from kvweave.models.rotary import rope_regime
from kvweave.ops.quantise import NOT_FINITE

MOST_ROWS: Final = 64
"""With more rows, the product is bound by arithmetic, and the copy of the result costs more than the exchange gains."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer."""


class LayerTime:
    """The measured time of one layer in the last pass; 0 before any pass has run."""

    def __init__(self) -> None:
        self._last = (1, 0.0)  # rows, seconds

    def record(self, rows: int, layer_s: float) -> None:
        """Record the seconds per layer of a pass over `rows` rows, without the wait for stored KV."""
        self._last = max(1, rows), max(0.0, layer_s)

    def lower_bound_s(self, rows: int) -> float:
        """Return the least seconds per layer of a pass over `rows`: proportional for fewer rows, the same for more."""
        last, layer_s = self._last
        return layer_s * min(1.0, rows / last)


class FewRowsLinear(nn.Linear):
    """`nn.Linear`, with the factors exchanged for 2 to MOST_ROWS rows."""

    def forward(self, states: Tensor) -> Tensor:
        """Return states (…, K) @ weight.T + bias, (…, N)."""
        rows = states.numel() // self.in_features
        if not 2 <= rows <= MOST_ROWS:
            return super().forward(states)
        product = (self.weight @ states.reshape(rows, self.in_features).T).T.contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*states.shape[:-1], self.out_features)


def use_few_rows(model: nn.Module) -> None:
    """Exchange the factors in a float32 model's plain linear layers on a CPU; its weights stay the same tensors."""
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ):
            module.__class__ = FewRowsLinear


def continuation_plan(model: PreTrainedModel, kv_cache: AppendableCache, rows: Tensor) -> RowPlan | None:
    """Return the plan by which rows (T,) appended to a cache attend; None for the model's own causal attention.

    Raises InvalidRequest where LongRoPE's frequencies change and the cache cannot be computed again under the new ones.
    """
    if kv_cache.plain:
        return None
    positions = kv_cache.positions_of(rows)
    held, last = int(positions[0]) - 1, int(positions[-1])
    if held >= 0 and rope_regime(model.config, held + 1) == "short" != rope_regime(model.config, last + 1):
        raise InvalidRequest(
            f"at position {last} the model needs its long RoPE frequencies, and this cache cannot be recomputed with them; "
            "allow fewer answer tokens (max_new_tokens)"
        )
    return kv_cache.continuation(rows) if kv_cache.continuation is not None else None


def hook_caches(model: PreTrainedModel) -> None:
    """From now on, rows appended to a cache attend by its continuation, and a cache is told when an attention layer starts.

    In any call of the model, whether kvweave or `generate` makes it.
    """
    model.register_forward_pre_hook(_use_continuation, with_kwargs=True)
    for module in attention_modules(model).values():
        module.register_forward_pre_hook(_announce_layer, with_kwargs=True)


def _use_continuation(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add the continuation's plan to a call that appends to a cache."""
    kv_cache = kwargs.get("past_key_values")
    if not isinstance(kv_cache, AppendableCache) or ROWS_KEYWORD in kwargs:
        return args, kwargs
    plan = continuation_plan(model, kv_cache, kv_cache.next_rows(kwargs["input_ids"].shape[1]))
    return args, (kwargs if plan is None else {**kwargs, ROWS_KEYWORD: plan})


def _announce_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache that a layer's attention starts, so that it can fetch what it needs during the projections."""
    for value in (*args, *kwargs.values()):  # families name the argument differently
        if isinstance(value, AppendableCache):
            value.before_layer(cast(int, module.layer_idx))


@contextmanager
def last_row_only(model: PreTrainedModel, kv_cache: FusedCache) -> Iterator[None]:
    """While active, the pass that writes to this cache runs the last layer's output for its last row alone.

    A pre-hook first runs the layer up to its attention with all rows. That writes their keys and values to the cache and
    shows them to the hooks; then the layer runs with the last row. Other calls of the model are not affected.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        plan = kwargs.get(ROWS_KEYWORD)
        if not isinstance(plan, RowPlan) or plan.rows.numel() < 2:
            return args, kwargs
        with suppress(_AttentionReached):
            module.forward(*args, **{**kwargs, ROWS_KEYWORD: _NotifyOnly(plan)})
        last = plan.subset(plan.rows[-1:])
        last.hooks = []  # they have seen all rows
        kv_cache.write_only(last.rows)
        index = {plan.rows.numel(): torch.tensor([plan.rows.numel() - 1], device=plan.rows.device)}
        kept = {name: select_rows(value, index) for name, value in kwargs.items()}
        return select_rows(args, index), {**kept, ROWS_KEYWORD: last}

    hook = decoder_layers(model)[-1].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's layers, in order: the list elements that contain the attention modules."""
    found: dict[int, nn.Module] = {}
    for name, attention in attention_modules(model).items():
        path = name.split(".")
        while not path[-1].isdigit():
            path.pop()
        found[int(attention.layer_idx)] = model.get_submodule(".".join(path))  # type: ignore[arg-type]
    return [found[layer] for layer in sorted(found)]


def select_rows(value: Any, indices: dict[int, Tensor]) -> Any:
    """Return an argument of a layer with only some of its rows.

    Tensors have rows in their second dimension, and `indices` maps the row counts to the indices that stay. Tensors with
    other counts and other values are returned as they are; tuples are searched.
    """
    if isinstance(value, tuple):
        return tuple(select_rows(each, indices) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] in indices:
        return value.index_select(1, indices[value.shape[1]])
    return value


class _AttentionReached(Exception):
    """Ends a layer at its attention, when its keys and values are in the cache."""


class _NotifyOnly:
    """A plan that shows the layer to the hooks and attends to nothing."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan

    def attend(self, call: AttentionCall) -> Tensor:
        self._plan.notify_hooks(call)
        raise _AttentionReached


def check_logits(logits: Tensor, model: str) -> None:
    """Raise ModelError if the logits of the model of this name are not numbers (NaN)."""
    if bool(logits.isnan().any()):
        raise ModelError(
            f"{model} gives NaN for this text, so there is no answer: {NOT_FINITE}. If only stored KV does it, "
            "`kvweave cache verify` drops that"
        )
