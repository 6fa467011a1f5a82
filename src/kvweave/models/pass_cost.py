"""The cost of a pass: floating-point operations, counted from the model's shape."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvweave.models.quantised import quantised_modules
from kvweave.models.support import Geometry


@dataclass(frozen=True, slots=True)
class PassCost:
    """Counts a decoder's multiplications and additions: two per weight that a row is multiplied with, without norms and the like.

    Attributes:
        per_row: operations of one row through all layers, without attention itself.
        per_key: operations of one row's attention to one key, in one layer.
        per_logits: operations of one row's logits.
        windows: each layer's sliding window; None if the layer attends to everything before a row.
    """

    per_row: int
    per_key: int
    per_logits: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, geometry: Geometry) -> Self:
        """Read a model's shape. Of a mixture of experts, count the experts that one row goes to."""
        config: Any = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        return cls(
            per_row=2 * _weights_per_row(model, config),
            per_key=4 * config.num_attention_heads * geometry.head_width,
            per_logits=2 * head.weight.numel() if head is not None else 0,
            windows=geometry.windows or (None,) * geometry.layers,
        )

    def flops(self, rows: Tensor, logits: int) -> int:
        """Return the operations of a pass over prompt positions `rows` (T,) that makes the logits of `logits` rows.

        Each row attends up to itself.
        """
        keys = rows.to("cpu", torch.long) + 1
        seen = sum(int((keys if window is None else keys.clamp(max=window)).sum()) for window in self.windows)
        return self.per_row * rows.numel() + self.per_key * seen + self.per_logits * logits


def _weights_per_row(model: PreTrainedModel, config: Any) -> int:
    """Count the weights of the decoder layers that each row is multiplied with."""
    used: int | None = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts: int | None = next((found for name in names if (found := getattr(config, name, None))), None)
    share = used / experts if used and experts else 1.0
    count = 0.0
    packed = ((f"{name}.weight", module.weight) for name, module in quantised_modules(model).items())
    weights: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(packed)}
    for name, weight in weights.items():
        if ".layers." not in f".{name}" or weight.dim() < 2:
            continue
        count += weight.numel() * (share if ".experts." in name else 1)
    return round(count)
