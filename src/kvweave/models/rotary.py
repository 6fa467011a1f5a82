"""Rotary positions, applied and watched through the model's own functions.

Keys are stored before rotation. They are seen by standing in front of the modelling module's
`apply_rotary_pos_emb` while a pass runs, and rotated again, when placed, by calling that very function
with the model's own `rotary_emb`: bit-identical, whatever the scaling, width or pairing of the family.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

APPLY_NAME = "apply_rotary_pos_emb"
_PATCH_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class LayerRotation:
    """How one layer rotates: the module that makes cos and sin, its extra arguments, and how many head dims turn.

    `embedding` None means that the layer applies no positions (NoPE).
    """

    embedding: nn.Module | None
    arguments: tuple[Any, ...] = ()
    width: int = 0


class RotationWatch(AbstractContextManager["RotationWatch"]):
    """While active, remembers what the latest rotation of this thread was given: query, key and cos.

    The stand-in is installed in the modelling module and taken out again on exit, whatever happens; passes
    of other threads go through it untouched. Each layer's rotation is handed over once, so that a layer
    that applies no positions finds nothing.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._thread = 0
        self._original: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._query: Tensor | None = None
        self._key: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> "RotationWatch":
        _PATCH_LOCK.acquire()
        self._thread = threading.get_ident()
        self._original = getattr(self._module, APPLY_NAME)
        setattr(self._module, APPLY_NAME, self._stand_in)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(self._module, APPLY_NAME, self._original)
        self._query = self._key = None
        _PATCH_LOCK.release()

    def _stand_in(
        self, q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self._original is not None
        if threading.get_ident() == self._thread:
            self._query, self._key = q, (k, cos)
        return self._original(q, k, cos, *args, **kwargs)

    def take_key(self) -> tuple[Tensor, Tensor] | None:
        """The unrotated key and the cos of the rotation since the last call; None if there was none."""
        seen, self._key = self._key, None
        return seen

    def key_before(self, rotated: Tensor) -> Tensor:
        """What a layer's rotated key (B, G, T, D) was before its rotation; the key itself for NoPE."""
        seen = self.take_key()
        return rotated if seen is None else _with_rest_of(rotated, seen[0])

    def query_before(self, rotated: Tensor) -> Tensor:
        """What a layer's rotated query (B, H, T, D) was before its rotation; the query itself for NoPE."""
        seen, self._query = self._query, None
        return rotated if seen is None else _with_rest_of(rotated, seen)


def _with_rest_of(rotated: Tensor, turning: Tensor) -> Tensor:
    """The head dims before they turned, and behind them those that never turn, (B, heads, T, D)."""
    width = turning.shape[-1]
    return turning if width == rotated.shape[-1] else torch.cat([turning, rotated[..., width:]], dim=-1)


class Rotation:
    """Rotates stored keys of every layer; made once per model by the probe, outside any watch.

    The model's function turns a query along with the keys, which is thrown away: `query_heads` of it. Few functions ask
    for one at all.
    """

    def __init__(self, module: ModuleType, layers: tuple[LayerRotation, ...], query_heads: int = 1) -> None:
        self.module = module
        self.layers = layers
        self.query_heads = query_heads
        with _PATCH_LOCK:  # no other thread's watch may stand in the function's place
            self.apply: Callable[..., tuple[Tensor, Tensor]] = getattr(module, APPLY_NAME)

    def angles(self, positions: Tensor, prompt_tokens: int, like: Tensor) -> "Angles":
        """Prepare cos and sin for positions (S,) in a prompt `prompt_tokens` long.

        The length matters to families that change frequencies with it (dynamic, longrope). `like` gives
        dtype and device.
        """
        return Angles(self, positions, prompt_tokens, like)

    def reset_lengths(self) -> None:
        """Forget the longest prompt a dynamic scaling has seen, so that a pass depends on its own length alone.

        The model keeps that state between calls; call this under the adapter's lock, before each pass.
        """
        embedding: Any
        for embedding in {layer.embedding for layer in self.layers if layer.embedding is not None}:
            if getattr(embedding, "rope_type", None) == "dynamic":
                embedding.register_buffer("inv_freq", embedding.original_inv_freq.clone(), persistent=False)
                embedding.max_seq_len_cached = embedding.original_max_seq_len


class Angles:
    """cos and sin for a run of positions, made on first use and shared by the layers that agree on them."""

    def __init__(self, rotation: Rotation, positions: Tensor, prompt_tokens: int, like: Tensor) -> None:
        self._rotation = rotation
        last = torch.tensor([max(prompt_tokens - 1, 0)], device=like.device)
        self._positions = torch.cat([positions, last])[None]  # the last one only tells the length
        self._like = like
        self._made: dict[tuple[int, tuple[Any, ...]], tuple[Tensor, Tensor]] = {}

    def rotate(self, layer: int, keys: Tensor, start: int = 0) -> Tensor:
        """Keys (B, G, S, D) of a layer, rotated to the run's positions from its `start` on: a new tensor, `keys` itself for NoPE."""
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
    """Name of the frequencies that a pass over `prompt_tokens` tokens uses.

    "fixed" for every scaling that ignores the length. LongRoPE has two sets; dynamic NTK has one for every
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
    """The transformers module that defines an attention class."""
    return sys.modules[type(attention).__module__]
