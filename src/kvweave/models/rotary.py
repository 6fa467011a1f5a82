"""Rotary positions, recorded and applied through the model's own functions.

Keys are stored before rotation. While a pass runs, `RotationRecorder` wraps the modelling module's
`apply_rotary_pos_emb` and records its arguments. To place stored keys, `Rotation` calls that same function with the
model's own `rotary_emb`: bit-identical, whatever the scaling, width or pairing of the family.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

APPLY_NAME = "apply_rotary_pos_emb"
_PATCH_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class LayerRotation:
    """How one layer rotates: the module that makes cos and sin, its extra arguments, and the number of head dims it turns.

    `embedding` is None for a layer that applies no positions (NoPE).
    """

    embedding: nn.Module | None
    arguments: tuple[Any, ...] = ()
    width: int = 0


class RotationRecorder(AbstractContextManager["RotationRecorder"]):
    """While active, records the arguments of this thread's latest rotation: key and cos.

    On entry the modelling module's function is replaced by a recording one, and on exit it is put back, errors
    included. Passes of other threads run through it unrecorded. Each recorded rotation can be read once, so that a layer
    that applies no positions finds none.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._thread = 0
        self._original: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._key: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> "RotationRecorder":
        _PATCH_LOCK.acquire()
        self._thread = threading.get_ident()
        self._original = getattr(self._module, APPLY_NAME)
        setattr(self._module, APPLY_NAME, self._record_and_apply)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(self._module, APPLY_NAME, self._original)
        self._key = None
        _PATCH_LOCK.release()

    def pop_key(self) -> tuple[Tensor, Tensor] | None:
        """Return the unrotated key and the cos of the rotation since the last call; None if there was none."""
        recorded, self._key = self._key, None
        return recorded

    def unrotated_key(self, rotated: Tensor) -> Tensor:
        """Return what a layer's rotated key (B, G, T, D) was before its rotation; the key itself for NoPE."""
        recorded = self.pop_key()
        if recorded is None:
            return rotated
        before = recorded[0]
        turning = before.shape[-1]  # of the head dims; the others follow
        return before if turning == rotated.shape[-1] else torch.cat([before, rotated[..., turning:]], dim=-1)

    def _record_and_apply(
        self, q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self._original is not None
        if threading.get_ident() == self._thread:
            self._key = k, cos
        return self._original(q, k, cos, *args, **kwargs)


class UnrotatedKeys(Protocol):
    """Knows the keys of a pass as they were before the model rotated them."""

    def unrotated_key(self, rotated: Tensor) -> Tensor:
        """Return what a layer's rotated key (B, G, T, D) was before its rotation; asked once per layer, in order."""
        ...


class GivenKeys:
    """The unrotated `keys` of one request's rows in a packed pass, which the pass sets at every layer."""

    keys: Tensor

    def unrotated_key(self, rotated: Tensor) -> Tensor:
        """Return them."""
        return self.keys


class RowCapture:
    """Shows the unrotated K and the V of the rows that a pass computes, and collects them for a prompt of `length` tokens.

    `layer_kv` are K and V of the layer that was computed last, (1, G, T, D) each. `kv` is (L, 2, G, N, D) after the pass, where only
    the rows that it computed are valid; None unless they are to `keep`. Owned by the request.
    """

    layer_kv: tuple[Tensor, Tensor]

    def __init__(self, recorder: UnrotatedKeys, layers: int, length: int, *, keep: bool) -> None:
        self.kv: Tensor | None = None
        self.recorder = recorder
        self._layers, self._length, self._keep = layers, length, keep

    def record(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Record a layer's new rows (1, G, T, D), with the unrotated keys in place of the rotated `keys`."""
        keys = self.recorder.unrotated_key(keys)
        self.layer_kv = keys, values
        if not self._keep:
            return
        if self.kv is None:
            self.kv = keys.new_empty(self._layers, 2, keys.shape[1], self._length, keys.shape[-1])
        self.kv[layer, 0].index_copy_(1, rows, keys[0])
        self.kv[layer, 1].index_copy_(1, rows, values[0])


class Rotation:
    """Rotates stored keys of every layer with the model's own function.

    Made once per model by the probe, while no recorder is active. That function rotates a query along with the keys,
    whose result is dropped: `query_heads` of it. Few families' functions need a query at all.
    """

    def __init__(self, module: ModuleType, layers: tuple[LayerRotation, ...], query_heads: int = 1) -> None:
        self.module = module
        self.layers = layers
        self.query_heads = query_heads
        with _PATCH_LOCK:  # another thread's recorder may have replaced the function
            self.apply: Callable[..., tuple[Tensor, Tensor]] = getattr(module, APPLY_NAME)

    def angles(self, positions: Tensor, prompt_tokens: int, like: Tensor) -> "Angles":
        """Prepare cos and sin for positions (S,) in a prompt of `prompt_tokens` tokens.

        The length matters to families that change frequencies with it (dynamic, longrope). `like` gives
        dtype and device.
        """
        return Angles(self, positions, prompt_tokens, like)

    def reset_lengths(self) -> None:
        """Reset the longest length that dynamic scaling has seen, so that a pass depends on its own length alone.

        The model keeps that state between calls. Call this under the adapter's lock, before each pass.
        """
        embedding: Any
        for embedding in {layer.embedding for layer in self.layers if layer.embedding is not None}:
            if getattr(embedding, "rope_type", None) == "dynamic":
                embedding.register_buffer("inv_freq", embedding.original_inv_freq.clone(), persistent=False)
                embedding.max_seq_len_cached = embedding.original_max_seq_len


class PlacedRotation(Protocol):
    """Rotates the stored keys of every layer to a run of positions (S,)."""

    def rotate(self, layer: int, keys: Tensor, start: int = 0) -> Tensor:
        """Rotate a layer's keys (B, G, S, D) to the run's positions from index `start`; return a new tensor or, for NoPE, `keys`."""
        ...


class KeyRotation(Protocol):
    """Rotates stored keys as the model does."""

    def angles(self, positions: Tensor, prompt_tokens: int, like: Tensor) -> PlacedRotation:
        """Return the rotation to positions (S,) in a prompt of `prompt_tokens` tokens, for keys like `like`."""
        ...


class Angles:
    """cos and sin for a run of positions, made on first use and shared by the layers with the same rotation."""

    def __init__(self, rotation: Rotation, positions: Tensor, prompt_tokens: int, like: Tensor) -> None:
        self._rotation = rotation
        last = torch.tensor([max(prompt_tokens - 1, 0)], device=like.device)
        self._positions = torch.cat([positions, last])[None]  # the last one only gives the length
        self._like = like
        self._made: dict[tuple[int, tuple[Any, ...]], tuple[Tensor, Tensor]] = {}

    def rotate(self, layer: int, keys: Tensor, start: int = 0) -> Tensor:
        """Rotate a layer's keys (B, G, S, D) to the run's positions from index `start`.

        Returns a new tensor; `keys` itself for NoPE.
        """
        how = self._rotation.layers[layer]
        if how.embedding is None or keys.shape[2] == 0:
            return keys
        turning = keys[..., : how.width]
        query = turning[:, : self._rotation.query_heads]
        cos, sin = (each[:, start : start + keys.shape[2]] for each in self._cos_sin(how))
        _, turned = self._rotation.apply(query, turning, cos, sin)
        return turned if how.width == keys.shape[-1] else torch.cat([turned, keys[..., how.width :]], dim=-1)

    def _cos_sin(self, how: LayerRotation) -> tuple[Tensor, Tensor]:
        key = (id(how.embedding), how.arguments)
        if key not in self._made:
            assert how.embedding is not None
            self._rotation.reset_lengths()
            cos, sin = how.embedding(self._like, self._positions, *how.arguments)
            self._made[key] = cos[:, :-1], sin[:, :-1]
        return self._made[key]


def rope_regime(config: Any, prompt_tokens: int) -> str:
    """Name the set of frequencies that a pass over `prompt_tokens` tokens uses.

    "fixed" for every scaling that ignores the length. LongRoPE has two sets. Dynamic NTK has one for every
    length beyond the trained one, so KV made there is exact for that length only.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    settings = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    for part in settings:
        context = getattr(text, "max_position_embeddings", 0)
        if part["rope_type"] == "longrope":
            return (
                "long" if prompt_tokens > part.get("original_max_position_embeddings", context) else "short"
            )
        if part["rope_type"] == "dynamic" and prompt_tokens > context:
            return f"dynamic-{prompt_tokens}"
    return "fixed"


def modelling_module(attention: nn.Module) -> ModuleType:
    """Return the transformers module that defines an attention class."""
    return sys.modules[type(attention).__module__]
