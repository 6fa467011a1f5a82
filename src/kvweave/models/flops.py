"""What a pass costs in floating-point operations, counted from the model's shape; knows nothing of who asked for it."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvweave.models.support import attention_modules


@dataclass(frozen=True, slots=True)
class PassCost:
    """Multiplications and additions of a decoder, two for each weight that a row meets; norms and the like are left out.

    Attributes:
        per_row: of one row through all layers, attention itself left out.
        per_key: of one row's attention to one key, in one layer.
        per_logits: of one row's logits.
        windows: each layer's sliding window, None where it attends to everything before it.
    """

    per_row: int
    per_key: int
    per_logits: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Read a model's shape. Of a mixture of experts, the experts that a row goes to are counted."""
        config: Any = model.config.get_text_config(decoder=True)
        layers = len(attention_modules(model))
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        head = model.get_output_embeddings()
        return cls(
            per_row=2 * _weights_met(model, config),
            per_key=4 * heads * width,
            per_logits=2 * head.weight.numel() if head is not None else 0,
            windows=_windows(config, layers),
        )

    def pass_over(self, rows: Tensor, logits: int) -> int:
        """Of a pass over prompt positions `rows` (T,), each attending up to itself, and so many rows' logits."""
        keys = rows.to("cpu", torch.long) + 1
        met = sum(int((keys if window is None else keys.clamp(max=window)).sum()) for window in self.windows)
        return self.per_row * rows.numel() + self.per_key * met + self.per_logits * logits


def _weights_met(model: PreTrainedModel, config: Any) -> int:
    """Weights of the decoder layers that each row is multiplied with."""
    used: int | None = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts: int | None = next((found for name in names if (found := getattr(config, name, None))), None)
    share = used / experts if used and experts else 1.0
    met = 0.0
    for name, weight in model.named_parameters():
        if ".layers." not in f".{name}" or weight.dim() < 2:
            continue
        met += weight.numel() * (share if ".experts." in name else 1)
    return round(met)


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
