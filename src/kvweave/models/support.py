"""Checks that kvweave supports a model, and finds out what its attention needs.

Instead of copying modelling code for every family, `probe` runs the unmodified model once over a few tokens. It records, for
each layer, the rotary module that made its angles, the number of head dims that turn, and the shape of its keys. It then
rotates the unrotated keys itself and compares bit by bit. A model that a fused cache cannot represent is refused here, with the
reason, before anything is computed or stored for it.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvweave.errors import UnsupportedModel
from kvweave.models.attention import ROWS_KEYWORD, RowPlan, attention_modules
from kvweave.models.hooks import LayerQueries, StopForward
from kvweave.models.rotary import APPLY_NAME, LayerRotation, Rotation, RotationRecorder, modelling_module

PROBE_TOKENS = 5

# Layer types that keep keys and values for every position; the others hold a recurrent or compressed state.
KV_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Layer types that hold a state of fixed size instead of keys and values for every token, as transformers names them.
STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
STATE_LAYERS = "linear-attention, state-space or convolution layers"

# Configuration fields whose presence (truthy) means a mechanism without per-token rotary keys in every layer.
REFUSED_FIELDS = {
    "kv_lora_rank": "multi-head latent attention (compressed keys)",
    "num_kv_shared_layers": "layers that share another layer's keys and values",
    "attention_chunk_size": "chunked local attention",
    "is_encoder_decoder": "an encoder",
    "alibi": "ALiBi positions instead of rotary ones",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes of a model's KV: L layers, G KV heads, D head width, context in tokens.

    `windows` has each layer's sliding window in tokens, None without one; it is empty if no layer has one.
    """

    layers: int
    kv_heads: int
    head_width: int
    context_tokens: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_width * self.dtype.itemsize


CRITICAL_LAYERS = 3
"""How many layers count as those whose attention best predicts what decoding attends to."""


def middle_layers(layers: int) -> tuple[int, ...]:
    """Return the CRITICAL_LAYERS middle layers of a model with this number of layers, or all if it has fewer."""
    first = max(0, (layers - CRITICAL_LAYERS) // 2)
    return tuple(range(first, min(layers, first + CRITICAL_LAYERS)))


def probe(model: PreTrainedModel) -> tuple[Geometry, Rotation]:
    """Run the model once over a few tokens and return its geometry and rotation.

    Raises UnsupportedModel, naming what kvweave cannot represent. The model is left as it was.
    """
    check_config(model.config)
    module = modelling_module(_first_attention(model))
    if not hasattr(module, APPLY_NAME):
        raise UnsupportedModel(
            f"{type(model).__name__} does not rotate keys through {APPLY_NAME}(): only models with rotary "
            "positions are supported (not ALiBi, learned or fused positions)"
        )
    recorded = _run_probe(model, module)
    layers = tuple(_layer_rotation(recorded, index) for index in range(len(recorded.updates)))
    rotation = _rotation(model, module, layers, recorded)
    keys = recorded.updates[0].keys
    geometry = Geometry(
        layers=len(layers),
        kv_heads=keys.shape[1],
        head_width=keys.shape[3],
        context_tokens=context_tokens(model.config.get_text_config(decoder=True)),
        dtype=keys.dtype,
        device=keys.device,
        windows=_windows(recorded, len(layers)),
    )
    return geometry, rotation


def check_config(config: Any) -> None:
    """Raise UnsupportedModel, naming the mechanism, if the configuration has one that cannot work."""
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    for field, mechanism in REFUSED_FIELDS.items():
        if getattr(config, field, None) or getattr(text, field, None):
            raise UnsupportedModel(
                f"{name} uses {mechanism} ({field}); kvweave supports decoders with rotary KV"
            )
    rope = getattr(text, "rope_parameters", None) or {}
    if any(isinstance(part, dict) and part.get("rope_type") == "dynamic" for part in rope.values()):
        raise UnsupportedModel(
            f"{name} scales positions dynamically per layer type; kvweave supports it for all layers alike"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - KV_LAYER_TYPES)
    if others:
        raise UnsupportedModel(
            f"{name} has {_mechanism(others)} (layers of type {', '.join(others)}); kvweave needs keys and values "
            f"for every token in every layer ({', '.join(sorted(KV_LAYER_TYPES))})"
        )


def _mechanism(layer_types: Sequence[str]) -> str:
    if STATE_LAYER_TYPES.issuperset(layer_types):
        return STATE_LAYERS
    return "compressed, indexed or other attention without plain keys and values"


def _first_attention(model: PreTrainedModel) -> nn.Module:
    for module in attention_modules(model).values():
        return module
    raise UnsupportedModel(
        f"{type(model).__name__} has no attention layers that transformers' KV cache knows"
    )


def context_tokens(config: Any) -> int:
    """Return how many tokens a text configuration allows; without a limit, more than any prompt has."""
    context = int(getattr(config, "max_position_embeddings", 0) or 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    # Dynamic scaling gives the trained length as the maximum and stretches it as needed.
    return int(context * rope.get("factor", 1)) if rope.get("rope_type") == "dynamic" else context


@dataclass(slots=True)
class _CacheUpdate:
    """One layer's cache update: keys as the cache got them, and as they were before rotation."""

    keys: Tensor
    values: Tensor
    unrotated: Tensor | None
    cos: Tensor | None


class _RecordingCache(DynamicCache):
    """A cache that records its updates; it keeps the keys of all layers in full, whatever the model's windows."""

    def __init__(self, recorder: RotationRecorder) -> None:
        super().__init__()
        self.updates: dict[int, _CacheUpdate] = {}
        self.embeddings: list[tuple[nn.Module, tuple[Any, ...], Tensor]] = []  # rotary module, arguments, cos
        self.windows: dict[int, int | None] = {}
        self._recorder = recorder

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        unrotated, cos = self._recorder.pop_key() or (None, None)
        self.updates[layer_idx] = _CacheUpdate(key_states, value_states, unrotated, cos)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def on_layer(self, queries: LayerQueries) -> None:
        """Record the window with which a layer attends."""
        self.windows[queries.layer] = queries.settings.window


def _run_probe(model: PreTrainedModel, module: ModuleType) -> _RecordingCache:
    recorder = RotationRecorder(module)
    recorded = _RecordingCache(recorder)

    def record_angles(
        embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        bound = inspect.signature(embedding.forward).bind(*args, **kwargs)
        recorded.embeddings.append((embedding, bound.args[2:], output[0]))

    hooks = [
        found.register_forward_hook(record_angles, with_kwargs=True)
        for found in model.modules()
        if "Rotary" in type(found).__name__
    ]
    head = model.get_output_embeddings()
    if head is not None:
        hooks.append(
            head.register_forward_pre_hook(_stop)
        )  # of a small model with many words, most of the pass
    device = model.device
    rows = torch.arange(PROBE_TOKENS, device=device)
    plan = RowPlan(rows, model.dtype)
    plan.hooks.append(recorded)
    try:
        with recorder, torch.no_grad(), suppress(StopForward):
            model(
                input_ids=rows[None] % model.config.get_text_config().vocab_size,
                position_ids=rows[None],
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=device),
                past_key_values=recorded,
                use_cache=True,
                logits_to_keep=1,
                **{ROWS_KEYWORD: plan},
            )
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot run a pass over chosen rows: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    _check_updates(model, recorded, plan)
    return recorded


def _stop(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise StopForward


def _check_updates(model: PreTrainedModel, recorded: _RecordingCache, plan: RowPlan) -> None:
    """Raise UnsupportedModel unless every layer has its own KV of one shape and attended by the plan."""
    name, updates = type(model).__name__, recorded.updates
    if sorted(updates) != list(range(len(updates))) or not updates:
        raise UnsupportedModel(
            f"{name} keeps KV for layers {sorted(updates)} only; every layer must have its own"
        )
    if plan.layers_seen != set(updates):
        raise UnsupportedModel(
            f"{name} does not hand extra arguments to its attention function in layers "
            f"{sorted(set(updates) - plan.layers_seen)}; rows cannot be chosen there"
        )
    shapes = {tuple(part.shape) for update in updates.values() for part in (update.keys, update.values)}
    if len(shapes) > 1:
        raise UnsupportedModel(
            f"{name} has keys and values of different shapes ({sorted(shapes)}); one is needed"
        )


def _windows(recorded: _RecordingCache, layers: int) -> tuple[int | None, ...]:
    windows = tuple(recorded.windows[layer] for layer in range(layers))
    return windows if any(window is not None for window in windows) else ()


def _layer_rotation(recorded: _RecordingCache, index: int) -> LayerRotation:
    update = recorded.updates[index]
    if update.unrotated is None or update.cos is None:
        return LayerRotation(None)
    for embedding, arguments, cos in recorded.embeddings:
        if cos is update.cos or cos.data_ptr() == update.cos.data_ptr():
            return LayerRotation(embedding, arguments, update.unrotated.shape[-1])
    raise UnsupportedModel(f"layer {index} rotates with angles that no rotary module of the model made")


def _rotation(
    model: PreTrainedModel, module: ModuleType, layers: tuple[LayerRotation, ...], recorded: _RecordingCache
) -> Rotation:
    """Return a rotation that equals the model's; without a query if that works, since a query costs a third more."""
    try:
        rotation = Rotation(module, layers, query_heads=0)
        _check_rotation(model, rotation, recorded)
    except Exception:  # the model's function may raise anything for an empty tensor
        rotation = Rotation(module, layers)
        _check_rotation(model, rotation, recorded)
    return rotation


def _check_rotation(model: PreTrainedModel, rotation: Rotation, recorded: _RecordingCache) -> None:
    """Raise UnsupportedModel unless rotating the unrotated keys gives the cached ones, bit by bit."""
    positions = torch.arange(PROBE_TOKENS, device=recorded.updates[0].keys.device)
    angles = rotation.angles(positions, PROBE_TOKENS, recorded.updates[0].keys)
    for index, update in recorded.updates.items():
        if update.unrotated is None:
            continue
        if update.unrotated.shape[:3] != update.keys.shape[:3]:
            raise UnsupportedModel(
                f"{type(model).__name__} rotates keys in another layout than it caches them"
            )
        rest = update.keys[..., update.unrotated.shape[-1] :]
        rotated = angles.rotate(index, torch.cat([update.unrotated, rest], dim=-1))
        if not torch.equal(rotated, update.keys):
            raise UnsupportedModel(
                f"{type(model).__name__} changes keys after rotating them (layer {index}); stored keys could not "
                "be moved exactly"
            )
