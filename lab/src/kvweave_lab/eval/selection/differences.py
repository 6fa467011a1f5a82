"""Full attention against stale KV, token by token and layer by layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.fused_cache import FusedCache
from kvweave.ops.scores import kv_deviation, residual_norms
from kvweave_lab.eval.selection.observe import FullView, StaleView


@dataclass(frozen=True, slots=True)
class Differences:
    """What stale KV gets wrong; every tensor (L, n) on the CPU, n the context's tokens.

    Attributes:
        keys: squared deviation of the keys (FusionRAG eq. 7).
        values: squared deviation of the values (FusionRAG eq. 7).
        size: squared length of full attention's keys and values together, what deviations are a share of.
        shift: the values' deviation as a sum of absolute differences (KVShare's norm).
        residual: what a token left stale adds to the loss (ProphetKV eq. 5).
        stale_values: length of the stale values, ‖V′‖₂.
    """

    keys: Tensor
    values: Tensor
    size: Tensor
    shift: Tensor
    residual: Tensor
    stale_values: Tensor


def differences(full: FullView, stale: StaleView) -> Differences:
    """Compare the two views of one prompt; one layer's KV at a time is brought to float32."""
    context = full.context
    layers = []
    for layer in range(len(full.kv_cache.layers)):
        keys, values = _context_kv(full.kv_cache, layer, context.start, context.end)  # each (G, n, D)
        old_keys, old_values = _context_kv(stale.kv_cache, layer, context.start, context.end)
        weights, old_weights = (view.attended.mass[layer].to(keys.device) for view in (full, stale))
        layers.append(
            (
                kv_deviation(keys, old_keys),
                kv_deviation(values, old_values),
                kv_deviation(keys, torch.zeros_like(keys)) + kv_deviation(values, torch.zeros_like(values)),
                (values.float() - old_values.float()).abs().sum(dim=(0, 2)),
                residual_norms(weights, values, old_weights, old_values),
                kv_deviation(old_values, torch.zeros_like(values)).sqrt(),
            )
        )
    return Differences(*(torch.stack(parts).cpu() for parts in zip(*layers, strict=True)))


def _context_kv(kv_cache: FusedCache, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    held = kv_cache.layers[layer]
    return held.keys[0, :, start:end], held.values[0, :, start:end]
