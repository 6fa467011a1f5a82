"""How an unmodified model is called: over rows of one canvas or of several, with a plan or by the library's masks.

Knows nothing of prompts; whoever calls sees to it that one pass runs at a time.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvweave.errors import InvalidRequest
from kvweave.models.attention import ROTATIONS_KEYWORD, ROWS_KEYWORD, AttentionCall, AttentionPlan, RowPlan
from kvweave.models.cache_base import AppendableCache
from kvweave.models.fused_cache import FusedCache
from kvweave.models.rotary import Rotation, RotationWatch, rope_regime


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a pass: token ids (T,) and rotary positions (T,) of its rows, and how they attend."""

    kv_cache: FusedCache
    ids: Tensor
    positions: Tensor
    plan: RowPlan


class PackedCache(Cache):
    """Stands in for the canvases of a packed pass: new rows pass through, the plan brings each to its canvas."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows (1, G, T, D) as they are."""
        return key_states, value_states


class PackedPlan:
    """Takes the rows of a packed pass apart, in the order of `parts`, and puts their outputs together again."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._edges = [0, *accumulate(part.ids.numel() for part in parts)]

    @property
    def wants_unrotated(self) -> bool:
        """Whether a watch of any request wants to see queries before rotation."""
        return any(part.plan.wants_unrotated for part in self._parts)

    @property
    def ids(self) -> Tensor:
        """Token ids of all rows, (rows,)."""
        return torch.cat([part.ids for part in self._parts])

    @property
    def positions(self) -> Tensor:
        """Rotary positions of all rows, (rows,)."""
        return torch.cat([part.positions for part in self._parts])

    @property
    def last_rows(self) -> Tensor:
        """Where each request's last row stands in the pass, (requests,)."""
        return torch.tensor(self._edges[1:], device=self._parts[0].ids.device) - 1

    def attend(self, call: AttentionCall) -> Tensor:
        """Write every request's new keys and values (1, G, T, D) to its canvas and attend there, (1, H, T, D)."""
        outputs = []
        for part, (start, end) in zip(self._parts, pairwise(self._edges), strict=True):
            own = slice(start, end)
            keys, values = part.kv_cache.update(call.keys[:, :, own], call.values[:, :, own], call.layer)
            query = call.query[:, :, own]
            unrotated = call.unrotated[:, :, own] if call.unrotated is not None else None
            outputs.append(
                part.plan.attend(replace(call, query=query, keys=keys, values=values, unrotated=unrotated))
            )
        return torch.cat(outputs, dim=2)


class ModelRunner:
    """Calls a model; hooks it once, so that what is appended to a cache attends by its continuation, whoever calls.

    `attention` are its attention layers: their caches are told when one begins.
    """

    def __init__(self, model: PreTrainedModel, rotation: Rotation, attention: Iterable[nn.Module]) -> None:
        self._model = model
        self._rotation = rotation
        model.register_forward_pre_hook(_continue_kv_cache, with_kwargs=True)
        for module in attention:
            module.register_forward_pre_hook(_announce_layer, with_kwargs=True)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        kv_cache: Cache,
        plan: AttentionPlan | None = None,
        rotations: RotationWatch | None = None,
        keep: int | Tensor = 1,
    ) -> Tensor:
        """One call over token ids (T,) at rotary positions (T,): logits (kept, vocab).

        Without a plan the rows attend as the model's own masks and the canvas' continuation say. `rotations` is
        active for the length of the call. `keep` is how many rows' logits are made, the last ones, or which rows'.
        """
        keywords: dict[str, Any] = {}
        if plan is not None:
            # Any 4D mask stops the library from building its own; our attention goes by the plan.
            mask = torch.zeros(1, 1, 1, 1, dtype=self._model.dtype, device=ids.device)
            keywords = {"attention_mask": mask, ROWS_KEYWORD: plan}
        if rotations is not None:
            keywords[ROTATIONS_KEYWORD] = rotations
        self._rotation.reset_lengths()
        with rotations or nullcontext(), torch.no_grad():
            out = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=kv_cache,
                use_cache=True,
                logits_to_keep=keep,
                **keywords,
            )
        logits: Tensor = out.logits[0]
        return logits

    def run_packed(self, parts: Sequence[Part]) -> list[Tensor]:
        """Logits (1, vocab) of every part's last row, in one call for all that share their rotary frequencies.

        Raises InvalidRequest if a canvas appears twice.
        """
        if len({id(part.kv_cache) for part in parts}) < len(parts):
            raise InvalidRequest(
                "a canvas appears twice in one packed pass; each request needs a canvas of its own"
            )
        together: dict[str, list[int]] = {}
        for number, part in enumerate(parts):
            regime = rope_regime(self._model.config, int(part.positions.max()) + 1)
            together.setdefault(regime, []).append(number)
        logits: dict[int, Tensor] = {}
        for numbers in together.values():
            plan = PackedPlan([parts[number] for number in numbers])
            rotations = self.rotation_hook() if plan.wants_unrotated else None
            found = self.run(plan.ids, plan.positions, PackedCache(), plan, rotations, plan.last_rows)
            for place, number in enumerate(numbers):
                logits[number] = found[place : place + 1]
        return [logits[number] for number in range(len(parts))]

    def rotation_hook(self) -> RotationWatch:
        """One that sees the rotations of a call it is handed to."""
        return RotationWatch(self._rotation.module)


def appended_plan(model: PreTrainedModel, kv_cache: AppendableCache, rows: Tensor) -> RowPlan | None:
    """How rows (T,) appended to a canvas attend, by a plan; None for the model's own causal attention.

    Raises InvalidRequest where LongRoPE's frequencies change and the canvas cannot be made again under the others.
    """
    if kv_cache.plain:
        return None
    positions = kv_cache.positions_of(rows)
    made, last = int(positions[0]) - 1, int(positions[-1])
    if made >= 0 and rope_regime(model.config, made + 1) == "short" != rope_regime(model.config, last + 1):
        raise InvalidRequest(
            f"position {last} is the first that needs the model's long frequencies; what the canvas holds cannot be "
            "made again under them, since its positions or its attention are not the model's own: allow fewer answer "
            "tokens (--max-new-tokens)"
        )
    return kv_cache.continuation(rows) if kv_cache.continuation is not None else None


def _continue_kv_cache(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let what is appended to a canvas attend by its continuation, whoever calls the model."""
    kv_cache = kwargs.get("past_key_values")
    if not isinstance(kv_cache, AppendableCache) or ROWS_KEYWORD in kwargs:
        return args, kwargs
    plan = appended_plan(model, kv_cache, kv_cache.next_rows(kwargs["input_ids"].shape[1]))
    return args, (kwargs if plan is None else {**kwargs, ROWS_KEYWORD: plan})


def _announce_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache that a layer's attention begins, so that what it needs can be fetched beside the projections."""
    for held in (*args, *kwargs.values()):  # families call it by different names
        if isinstance(held, AppendableCache):
            held.before_layer(cast(int, module.layer_idx))
