"""The work of computing rows, counted: what a pass cannot do without, whoever runs it.

A row's work is its linear layers and attention to its own prefix; a pass also reads every weight it uses once. Counted
from what passes really computed, layer by layer, so that narrowed and shortened ones count as what they are. Of the layer at
which a pass is ended nothing counts; the last layer of one that is not counts in full, though little of it is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ROWS_KEYWORD, LayerQueries, RowPlan
from kvweave.models.partial_layers import decoder_layers


@dataclass(frozen=True, slots=True)
class Work:
    """Of one pass: floating-point operations, those of attention among them, and bytes of weights that it reads."""

    flops: float
    attention_flops: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What a pass computed in one layer: prompt positions (T,), with queries of so many numbers in all heads."""

    layer: int
    rows: Tensor
    query_width: int
    window: int | None

    @property
    def attention_flops(self) -> float:
        """Every row against each key at or before its position, within the window, for logits and for values."""
        prefix = self.rows.double() + 1
        if self.window is not None:
            prefix = prefix.clamp(max=self.window)
        return 4 * self.query_width * float(prefix.sum())


@dataclass(frozen=True, slots=True)
class _Weights:
    """Of one layer, or of the head: how many a row is multiplied with, and bytes of all of them."""

    per_row: float
    bytes: int


class WorkCount:
    """Counts the passes of a model; made once per model."""

    def __init__(self, adapter: Adapter) -> None:
        self._model = adapter.model
        share = _active_share(adapter.model.config)
        self._layers = [_weights(layer, share) for layer in decoder_layers(adapter.model)]
        self._head = _weights(adapter.model.get_output_embeddings(), share)

    @contextmanager
    def counting(self) -> Iterator[list[Work]]:
        """The works of all passes that run meanwhile, in order; complete when the context ends."""
        works: list[Work] = []
        passes: list[_Seen] = []

        def begin(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            plan = kwargs.get(ROWS_KEYWORD)
            if isinstance(plan, RowPlan):
                passes.append(_Seen())
                plan.hooks.insert(0, passes[-1])  # before any that ends the pass

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

    def _work(self, seen: "_Seen") -> Work:
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


class _Seen:
    """The layers of one pass, and whether it went on to its logits; watches it."""

    def __init__(self) -> None:
        self.layers: list[LayerRows] = []
        self.finished = False

    def see(self, queries: LayerQueries) -> None:
        """Note rows and shapes, and nothing of the contents."""
        width = queries.query.shape[1] * queries.query.shape[3]
        self.layers.append(LayerRows(queries.layer, queries.rows, width, queries.window))


def _weights(module: nn.Module, active_share: float) -> _Weights:
    """Matrices of a module; of experts, which have a dimension more, the share that a row goes through."""
    matrices = [weight for weight in module.parameters() if weight.dim() >= 2]
    per_row = sum(weight.numel() * (active_share if weight.dim() > 2 else 1.0) for weight in matrices)
    return _Weights(per_row, sum(weight.nbytes for weight in matrices))


def _active_share(config: Any) -> float:
    text = config.get_text_config(decoder=True)
    used = getattr(text, "num_experts_per_tok", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return used / experts if used and experts else 1.0
