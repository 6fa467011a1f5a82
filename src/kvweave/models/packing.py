"""Several requests' rows in one call of the model: concatenated, so that none is padded.

Everything in a model but attention treats rows one by one. At each layer the rows are taken apart again: every
request writes its own canvas and attends to it by its own plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.canvas import Canvas


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a pass: token ids (T,) and rotary positions (T,) of its rows, and how they attend."""

    canvas: Canvas
    ids: Tensor
    positions: Tensor
    plan: RowPlan


class PackedCanvas(Cache):
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
            keys, values = part.canvas.update(call.keys[:, :, own], call.values[:, :, own], call.layer)
            query = call.query[:, :, own]
            unrotated = call.unrotated[:, :, own] if call.unrotated is not None else None
            outputs.append(
                part.plan.attend(replace(call, query=query, keys=keys, values=values, unrotated=unrotated))
            )
        return torch.cat(outputs, dim=2)
