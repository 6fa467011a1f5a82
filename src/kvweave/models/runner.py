"""One call of the model: what a request gives to it, and how it is made."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvweave.models.attention import ROTATIONS_KEYWORD, ROWS_KEYWORD, AttentionPlan, RowPlan
from kvweave.models.cache_base import AppendableCache
from kvweave.models.forward import continuation_plan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.hooks import UpdateHook
from kvweave.models.rotary import Rotation, RotationRecorder


@dataclass(frozen=True, slots=True)
class PassRows:
    """One request's rows in a pass.

    Attributes:
        kv_cache: what the rows attend to, and where their K,V go.
        ids, positions: token ids and rotary positions (T,).
        plan: how they attend.
        keep: the number of rows, from the end, whose logits are made.
        appends: whether they follow what the cache holds; otherwise they are prompt rows.
        hook: sees what every layer is about to replace.
    """

    kv_cache: FusedCache
    ids: Tensor
    positions: Tensor
    plan: RowPlan
    keep: int = 1
    appends: bool = False
    hook: UpdateHook | None = None

    def some(self, plan: RowPlan, keep: int = 1) -> "PassRows":
        """Return the rows of `plan` alone, a subset."""
        places = torch.searchsorted(self.plan.rows, plan.rows)
        ids, positions = self.ids[places], self.positions[places]
        return replace(self, ids=ids, positions=positions, plan=plan, keep=keep)


class ModelRunner:
    """Calls a model with a cache and a plan.

    Hooks the model once. In any call, rows appended to a cache then attend by its continuation, and a cache is told when
    one of the `attention` layers starts.
    """

    def __init__(self, model: PreTrainedModel, rotation: Rotation, attention: Iterable[nn.Module]) -> None:
        self.model = model
        self.rotation = rotation
        model.register_forward_pre_hook(_use_continuation, with_kwargs=True)
        for module in attention:
            module.register_forward_pre_hook(_announce_layer, with_kwargs=True)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        kv_cache: Cache,
        plan: AttentionPlan | None = None,
        recorder: RotationRecorder | None = None,
        keep: int | Tensor = 1,
    ) -> Tensor:
        """Call the model over token ids (T,) at rotary positions (T,) and return logits (kept, vocab).

        Args:
            ids: token ids (T,).
            positions: rotary positions (T,).
            kv_cache: holds the keys and values that the rows attend to, and takes theirs.
            plan: how the rows attend; None for the model's own masks and the cache's continuation.
            recorder: active for the length of the call.
            keep: how many rows' logits to make, from the end, or the indices of these rows.
        """
        keywords: dict[str, Any] = {}
        if plan is not None:
            # Any 4D mask keeps the library from building its own; our attention follows the plan.
            mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=ids.device)
            keywords = {"attention_mask": mask, ROWS_KEYWORD: plan}
        if recorder is not None:
            keywords[ROTATIONS_KEYWORD] = recorder
        self.rotation.reset_lengths()
        with recorder or nullcontext(), torch.no_grad():
            out = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=kv_cache,
                use_cache=True,
                logits_to_keep=keep,
                **keywords,
            )
        logits: Tensor = out.logits[0]
        return logits


def _use_continuation(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the continuation's plan to a call that appends to a cache, whether kvweave or `generate` makes it."""
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
