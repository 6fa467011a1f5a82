"""Packed passes: rows of several requests in one call of the model, without padding. N together equal N alone.

Linear layers see all rows at once. Attention is split by request. Requests over shared spans attend in one call of an operator
that reads the spans in place; the others attend one after another. What goes wrong for one request ends its part of the pass alone.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvweave.errors import InvalidRequest
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.hooks import StopForward
from kvweave.models.pass_schedule import PassRows
from kvweave.models.rotary import GivenKeys, RotationRecorder
from kvweave.models.shared_spans import SharedSpanCache
from kvweave.ops.attention import RowAttention
from kvweave.ops.row_attention import row_attention


def run_packed(
    requests: Sequence[PassRows],
    call_model: Callable[..., Tensor],
    rope_regime: Callable[[int], str],
    modelling: ModuleType,
) -> list[Tensor | Exception]:
    """Return every request's logits (keep, vocab), or the error that ended its part of the pass.

    One call of the model (`Adapter.call_model`) for each set of rotary frequencies that the requests need, which `rope_regime`
    names. `modelling` is the module whose function rotates keys. Raises InvalidRequest if a cache appears twice.
    """
    if len({id(request.kv_cache) for request in requests}) < len(requests):
        raise InvalidRequest(
            "a cache appears twice in one packed pass; each request needs a cache of its own"
        )
    regimes = [rope_regime(int(request.positions.max()) + 1) for request in requests]
    results: dict[int, Tensor | Exception] = {}
    for regime in dict.fromkeys(regimes):
        numbers = [number for number, own in enumerate(regimes) if own == regime]
        plan = _PackedPlan([requests[number] for number in numbers], RotationRecorder(modelling))
        results |= zip(numbers, _run_together(plan, call_model), strict=True)
    return [results[number] for number in range(len(requests))]


def _run_together(plan: "_PackedPlan", call_model: Callable[..., Tensor]) -> list[Tensor | Exception]:
    with ExitStack() as stack:
        for request in plan.requests:
            if not request.appends:
                stack.enter_context(request.kv_cache.writing(request.plan.rows))
        found = call_model(plan.ids, plan.positions, _PassThroughCache(), plan, plan.recorder, plan.kept_rows)
    parts = found.split([request.keep for request in plan.requests])
    return [plan.errors.get(number, logits) for number, logits in enumerate(parts)]


class _PackedPlan:
    """Splits the rows of a packed pass by request, and joins their attention outputs again.

    `errors` has what ended a request's part of the pass, by the request's number. Its rows run on as zeros.
    """

    def __init__(self, requests: Sequence[PassRows], recorder: RotationRecorder) -> None:
        self.errors: dict[int, Exception] = {}
        self.requests = requests
        self._edges = [0, *accumulate(request.ids.numel() for request in requests)]
        captures = any(request.kv_cache.capture is not None for request in requests)
        self.recorder = recorder if captures else None
        self._shared: dict[tuple[int, ...], RowAttention] = {}

    @property
    def ids(self) -> Tensor:
        """Token ids of all rows, (rows,)."""
        return torch.cat([request.ids for request in self.requests])

    @property
    def positions(self) -> Tensor:
        """Rotary positions of all rows, (rows,)."""
        return torch.cat([request.positions for request in self.requests])

    @property
    def kept_rows(self) -> Tensor:
        """Indices of the rows whose logits are made, request by request."""
        ends = zip(self._edges[1:], self.requests, strict=True)
        kept = [torch.arange(end - request.keep, end) for end, request in ends]
        return torch.cat(kept).to(self.requests[0].ids.device)

    def attend(self, call: AttentionCall) -> Tensor:
        """Write every request's new keys and values (1, G, T, D) to its cache and attend there, (1, H, T, D)."""
        captured = None if self.recorder is None else self.recorder.unrotated_key(call.keys)
        out = torch.zeros_like(call.query)
        in_place = []
        for number, (request, (start, end)) in enumerate(
            zip(self.requests, pairwise(self._edges), strict=True)
        ):
            if number in self.errors:
                continue
            own = slice(start, end)
            capture = request.kv_cache.capture
            if captured is not None and capture is not None:
                assert isinstance(capture.recorder, GivenKeys)
                capture.recorder.keys = captured[:, :, own]
            query, keys, values = (each[:, :, own] for each in (call.query, call.keys, call.values))
            try:
                done = self._attend_alone(request, replace(call, query=query, keys=keys, values=values))
            except StopForward as stop:
                self.errors[number] = stop.with_traceback(None)  # its frames would hold this plan: a cycle
                continue
            except Exception as error:
                self.errors[number] = error
                continue
            if done is None:
                in_place.append(number)
            else:
                out[:, :, own] = done
        if in_place:
            self._attend_in_place(call, in_place, out)
        return out

    def _attend_alone(self, request: PassRows, call: AttentionCall) -> Tensor | None:
        """Write a request's rows and attend; return None where its rows can attend in place, together with others."""
        kv_cache = request.kv_cache
        if not isinstance(kv_cache, SharedSpanCache) or type(request.plan) is not RowPlan:
            keys, values = kv_cache.update(call.keys, call.values, call.layer)
            return request.plan.attend(replace(call, keys=keys, values=values))
        kv_cache.layers[call.layer].write(call.keys, call.values)
        if request.plan.hooks:
            keys, values = kv_cache.layer_kv(call.layer, call.keys)
            request.plan.notify_hooks(replace(call, keys=keys, values=values))
        return None

    def _attend_in_place(self, call: AttentionCall, numbers: Sequence[int], out: Tensor) -> None:
        """Write the attention of the requests over shared spans to `out` (1, H, rows, D)."""
        own = [self.requests[number] for number in numbers]
        attention = self._shared.get(tuple(numbers))
        if attention is None:
            rows = [request.plan.rows for request in own]
            attention = row_attention(rows, call.query.dtype, shared_spans=True)
            self._shared = {tuple(numbers): attention}
        inputs = [request.kv_cache.layers[call.layer].attention_input() for request in own]
        everybody = len(numbers) == len(self.requests)
        parts = [slice(self._edges[number], self._edges[number + 1]) for number in numbers]
        query = call.query if everybody else torch.cat([call.query[:, :, part] for part in parts], dim=2)
        done = attention.attend(query, inputs, call.settings)
        start = 0
        for part in parts:
            count = part.stop - part.start
            out[:, :, part] = done[:, :, start : start + count]
            start += count


class _PassThroughCache(Cache):
    """Replaces all caches of a packed pass: returns new rows as they are, and the plan writes them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states
