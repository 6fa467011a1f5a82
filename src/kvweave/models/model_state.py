"""A model's own cache as plain tensors, and back: the state after a text, to continue from it later or elsewhere.

For models whose KV a fused cache cannot represent. transformers keeps such a state in a `DynamicCache`: per layer keys and
values, a convolution's last inputs, a recurrent state, or several of them. Knows nothing of tokens, stores or recipes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvweave.errors import UnsupportedModel

KINDS: Final = ("keys", "values", "conv", "recurrent")
"""What a layer may hold. A tensor's name is one of these, the layer's number, and for the last two the state's number."""

_WITHOUT_STATE: Final = "DummyLayer"
_COPIED: Final = frozenset(
    {
        _WITHOUT_STATE,
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
"""Classes of transformers.cache_utils, by name: earlier versions lack some."""


@dataclass(slots=True)
class ModelState:
    """A cache and the number of tokens that it was computed from; a pass over more tokens changes both."""

    cache: DynamicCache
    tokens: int = 0


def empty_state(config: Any) -> ModelState:
    """Return the state before any token.

    Raises UnsupportedModel, naming the class, if a layer of the cache cannot be copied in and out.
    """
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer).__module__ != DynamicCache.__module__ or type(layer).__name__ not in _COPIED:
            raise UnsupportedModel(f"its cache has layers of class {type(layer).__name__}")
    return ModelState(cache)


def copy_tensors(state: ModelState) -> dict[str, Tensor]:
    """Return copies of a state's tensors on the CPU, by name: keys_0, values_0, conv_1_0, recurrent_1_0, ….

    Keys and values are (1, G, S, D), rotated as the model rotated them, of the last S tokens that the layer still sees.
    """
    return {name: tensor.detach().clone().cpu() for name, tensor in _tensors(state)}


def restore(config: Any, tensors: Mapping[str, Tensor], tokens: int, device: torch.device) -> ModelState:
    """Return the state after `tokens` tokens that `copy_tensors` has returned; the tensors given are copied."""
    state = empty_state(config)
    found = {name: tensor.to(device) for name, tensor in tensors.items()}
    for number, layer in enumerate(state.cache.layers):
        if f"keys_{number}" in found:
            layer.update(found[f"keys_{number}"], found[f"values_{number}"])
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = tokens  # a window holds fewer
        if isinstance(layer, LinearAttentionLayer):
            _restore_linear(layer, number, found)
    state.tokens = tokens
    return state


def differences(state: ModelState, other: ModelState) -> list[str]:
    """Return what differs between two states, bit by bit and in every attribute of every layer, as layer.attribute."""
    found = []
    for number, layers in enumerate(zip(state.cache.layers, other.cache.layers, strict=True)):
        here, there = (vars(layer) for layer in layers)
        names = sorted(here.keys() | there.keys())
        found += [f"{number}.{name}" for name in names if not _equal(here.get(name), there.get(name))]
    return found


def empty_layers(state: ModelState) -> list[int]:
    """Return the numbers of the layers that hold nothing, though they may; none after a pass that uses its cache."""
    held = {name.split("_")[1] for name, _ in _tensors(state)}
    return [
        number
        for number, layer in enumerate(state.cache.layers)
        if str(number) not in held and type(layer).__name__ != _WITHOUT_STATE
    ]


def _tensors(state: ModelState) -> Iterator[tuple[str, Tensor]]:
    for number, layer in enumerate(state.cache.layers):
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            yield f"keys_{number}", layer.keys
            yield f"values_{number}", layer.values
        if isinstance(layer, LinearAttentionLayer):
            for index in range(layer.number_of_states):
                for kind, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                    tensor = held[index]
                    if tensor is not None:
                        yield f"{kind}_{number}_{index}", tensor


def _restore_linear(layer: LinearAttentionLayer, number: int, found: Mapping[str, Tensor]) -> None:
    for index in range(layer.number_of_states):
        conv, recurrent = (found.get(f"{kind}_{number}_{index}") for kind in ("conv", "recurrent"))
        if conv is not None:
            layer.update_conv_state(conv, state_idx=index)
        if recurrent is not None:
            layer.update_recurrent_state(recurrent, state_idx=index)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
