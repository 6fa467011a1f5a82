"""What a request's time is compared with: full prefill, row attention through a mask, and the least possible time.

kvweave's attention function passes calls without rows on to transformers; `stock_attention` removes even that step.

The least time that a request could take on this machine follows a roofline model:

    limit = Σ over passes of max(FLOPs / rate, weight bytes / memory bandwidth) + stored bytes / read bandwidth

FLOPs are counted for the rows that the passes of a request really computed, layer by layer: linear layers, and attention
of each row to its own prefix. The layer at which a pass is stopped does not count. The last layer of a complete pass
counts in full, although little of it is needed. `rate` is what full prefill of the same prompt reaches in the same run,
memory bandwidth that of summing a large tensor, read bandwidth that of reading the entry files.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ATTENTION_NAME, ROWS_KEYWORD, AttentionCall, RowPlan
from kvweave.models.forward import decoder_layers
from kvweave.models.hooks import LayerQueries
from kvweave.ops.blocked_attention import additive_mask
from kvweave.recipes.place import Causal
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave_lab.bench.measurement import elapsed_s, read_files

BLOCK_TOKENS = 1024
"""Tokens of a block in `blockwise_prefill`."""


def transformers_prefill(adapter: Adapter, ids: Tensor) -> Tensor:
    """Prefill a prompt (1, N) in one causal pass; return the logits (1, vocab) of the last position."""
    return blockwise_prefill(adapter, ids, ids.shape[1])


def blockwise_prefill(adapter: Adapter, ids: Tensor, block_tokens: int = BLOCK_TOKENS) -> Tensor:
    """Prefill a prompt (1, N) block by block; return the logits (1, vocab) of the last position."""
    cache = DynamicCache(config=adapter.model.config)
    logits = torch.empty(0)
    with torch.no_grad():
        for block in ids.split(block_tokens, dim=1):
            logits = adapter.model(block, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


@contextmanager
def stock_attention(adapter: Adapter) -> Iterator[None]:
    """Let the model call transformers' sdpa directly. Models with a soft cap, which sdpa refuses, keep kvweave's."""
    model: PreTrainedModel = adapter.model
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@dataclass(frozen=True, slots=True)
class MaskAttend(Causal):
    """The attend slot with an additive mask for transformers' fused attention, instead of kvweave's row attention.

    The result is the same; the time is what a mask costs without a special operator.
    """

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return a plan with one mask for all layers that share a window."""
        geometry = request.adapter.geometry
        return MaskRowPlan(rows.to(geometry.device), geometry.dtype)


class MaskRowPlan(RowPlan):
    """Rows (T,), ascending, with an additive mask (T, N) that hides later keys, made once per window.

    Soft-capped logits, which the fused kernels refuse, go through the base class's attention.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend from every row to every key of the prompt."""
        if call.settings.softcap is not None:
            return super().attend(call)
        self.notify_hooks(call)
        return F.scaled_dot_product_attention(
            call.query,
            call.keys,
            call.values,
            attn_mask=self._mask(call),
            scale=call.settings.scaling,
            enable_gqa=call.query.shape[1] != call.keys.shape[1],
        )

    def subset(self, rows: Tensor) -> Self:
        """Return the same plan, hooks included, for some of its rows."""
        smaller = super().subset(rows)
        smaller._masks = {}
        return smaller

    def _mask(self, call: AttentionCall) -> Tensor:
        if call.settings.window not in self._masks:
            positions = torch.arange(call.keys.shape[2], device=self.rows.device)
            self._masks[call.settings.window] = additive_mask(
                self.rows, positions, call.settings.window, call.query.dtype
            )
        return self._masks[call.settings.window]


_TRIES = 5
SUMMED_BYTES = 2**28  # much larger than the last-level cache


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one pass: floating-point operations, the part of attention, and bytes of the weights that it reads."""

    flops: float
    attention_flops: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations and bytes per second of the machine during the measurement."""

    flops: float
    memory_bytes: float
    read_bytes: float

    def limit_s(self, works: Sequence[Work], stored_bytes: int) -> float:
        """Return the seconds of a request's passes and loading at these rates."""
        passes = (max(work.flops / self.flops, work.weight_bytes / self.memory_bytes) for work in works)
        return sum(passes) + stored_bytes / self.read_bytes


def measure_memory_bandwidth(device: torch.device) -> float:
    """Return the best memory bandwidth of several sums over a large tensor, with all threads."""
    tensor = torch.ones(SUMMED_BYTES // 4, dtype=torch.float32, device=device)
    return SUMMED_BYTES / min(elapsed_s(lambda: float(tensor.sum())) for _ in range(_TRIES))


def measure_read_bandwidth(files: Sequence[Path]) -> float:
    """Return the bandwidth of reading these files one after the other, from wherever they are now."""
    return sum(file.stat().st_size for file in files) / elapsed_s(lambda: read_files(files))


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows that a pass computed in one layer: prompt positions (T,), and the width of a query over all heads."""

    layer: int
    rows: Tensor
    query_width: int
    window: int | None

    @property
    def attention_flops(self) -> float:
        """Operations of logits and values: each row attends to the keys up to its position, within the window."""
        prefix = self.rows.double() + 1
        if self.window is not None:
            prefix = prefix.clamp(max=self.window)
        return 4 * self.query_width * float(prefix.sum())


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of one layer or of the head: how many a row is multiplied with, and bytes of all of them."""

    per_row: float
    bytes: int


class WorkCounter:
    """Counts the work of a model's passes. Create one per model."""

    def __init__(self, adapter: Adapter) -> None:
        self._model = adapter.model
        share = _active_share(adapter.model.config)
        self._layers = [_weights(layer, share) for layer in decoder_layers(adapter.model)]
        self._head = _weights(adapter.model.get_output_embeddings(), share)

    @contextmanager
    def record(self) -> Iterator[list[Work]]:
        """Collect the work of every pass in the context, in order; the list is complete when the context ends."""
        works: list[Work] = []
        passes: list[_PassRecorder] = []

        def begin(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            plan = kwargs.get(ROWS_KEYWORD)
            if isinstance(plan, RowPlan):
                passes.append(_PassRecorder())
                plan.hooks.insert(0, passes[-1])  # before any hook that stops the pass

        def end(model: nn.Module, args: Any, kwargs: dict[str, Any], out: object) -> None:
            if isinstance(kwargs.get(ROWS_KEYWORD), RowPlan):
                passes[-1].finished = True

        hooks = (
            self._model.register_forward_pre_hook(begin, with_kwargs=True),
            self._model.register_forward_hook(end, with_kwargs=True),
        )
        try:
            yield works
        finally:
            for hook in hooks:
                hook.remove()
        works.extend(self._work(seen) for seen in passes)

    def _work(self, seen: "_PassRecorder") -> Work:
        flops = attention_flops = weight_bytes = 0.0
        for layer in seen.layers if seen.finished else seen.layers[:-1]:
            weights = self._layers[layer.layer]
            flops += 2 * weights.per_row * layer.rows.numel() + layer.attention_flops
            attention_flops += layer.attention_flops
            weight_bytes += weights.bytes
        if seen.finished:  # logits of the last row
            flops += 2 * self._head.per_row
            weight_bytes += self._head.bytes
        return Work(flops, attention_flops, weight_bytes)


class _PassRecorder:
    """A hook that records the layers of one pass, and whether the pass reached its logits."""

    def __init__(self) -> None:
        self.layers: list[LayerRows] = []
        self.finished = False

    def on_layer(self, queries: LayerQueries) -> None:
        """Record rows and shapes, not contents."""
        width = queries.query.shape[1] * queries.query.shape[3]
        self.layers.append(LayerRows(queries.layer, queries.rows, width, queries.settings.window))


def _weights(module: nn.Module, active_share: float) -> _Weights:
    """Count a module's matrices. Of experts, which have one dimension more, only the active share counts per row."""
    matrices = [weight for weight in module.parameters() if weight.dim() >= 2]
    per_row = sum(weight.numel() * (active_share if weight.dim() > 2 else 1.0) for weight in matrices)
    return _Weights(per_row, sum(weight.nbytes for weight in matrices))


def _active_share(config: Any) -> float:
    text = config.get_text_config(decoder=True)
    used = getattr(text, "num_experts_per_tok", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return used / experts if used and experts else 1.0
