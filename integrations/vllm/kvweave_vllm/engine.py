"""vLLM's model as recipes use a model: nested passes, pages, and the model's own rotary modules."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvweave.errors import InvalidRequest, UnsupportedModel
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.engine import Engine
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.prompt import PromptTemplate
from kvweave.models.rotary import PlacedRotation, RowCapture
from kvweave.models.support import Geometry, middle_layers
from kvweave.ops.attention import AttentionSettings
from kvweave.types import ModelFingerprint
from kvweave_vllm.passes import NestedPasses, RequestRows
from kvweave_vllm.ranks import Heads

PROBE_TOKENS = 5


class PagedCache(FusedCache):
    """The KV of one request, in vLLM's pages and, for selectors and the store, in prompt order.

    `blocks` (blocks,) is the request's block table. Nothing is written before position `first`: other requests may use those
    blocks. `placed` (rows,) are the positions from there on that stored KV is placed at.
    """

    def __init__(self, blocks: Tensor, first: int, *args: Any) -> None:
        super().__init__(*args)
        self.blocks, self.first = blocks, first
        spans = [torch.arange(max(each.start, first), max(each.end, first)) for each in self.spans]
        self.placed = torch.cat([torch.arange(0), *spans])
        self.in_pages = False


class VllmEngine(Engine):
    """Runs chosen rows through the model of a vLLM worker, in the blocks of the request that `use_blocks` names.

    Raises UnsupportedModel for attention whose KV cannot be placed.
    """

    rotation: "_Rotation"

    def __init__(self, runner: Any, fingerprint: ModelFingerprint, template: PromptTemplate) -> None:
        self.passes = NestedPasses(runner)
        self.template = template
        self._fingerprint = fingerprint
        layers = self.passes.layers
        shapes = {(layer.num_kv_heads, layer.head_size, layer.head_size_v) for layer in layers}
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"its layers have keys and values of different shapes {sorted(shapes)}; one is needed"
            )
        windows = tuple(layer.sliding_window for layer in layers)
        self.geometry = Geometry(
            layers=len(layers),
            kv_heads=self.passes.heads.total,
            head_width=layers[0].head_size,
            context_tokens=runner.model_config.max_model_len,
            dtype=runner.model_config.dtype,
            device=self.passes.device,
            windows=windows if any(window is not None for window in windows) else (),
        )
        self._settings = [
            AttentionSettings(layer.impl.scale, layer.sliding_window, layer.impl.logits_soft_cap or None)
            for layer in layers
        ]
        self.critical_layers = middle_layers(len(layers))
        self.rotation = _Rotation(self._find_rotary())
        self._blocks, self._first = torch.empty(0, dtype=torch.int32), 0

    @property
    def fingerprint(self) -> ModelFingerprint:
        return self._fingerprint

    def use_blocks(self, blocks: Tensor, first: int) -> None:
        """Let the next caches use these blocks (blocks,), and write none of their positions before `first`."""
        self._blocks, self._first = blocks, first

    def rope_regime(self, prompt_tokens: int) -> str:
        """Return "fixed": models with frequencies of another kind are refused."""
        return "fixed"

    def _cache_of(
        self,
        length: int,
        placed: tuple[PlacedSpan, ...],
        angles: PlacedRotation,
        positions: Tensor,
        *,
        share: bool,
    ) -> PagedCache:
        room = len(self._blocks) * self.passes.block_tokens
        if length > room:
            raise InvalidRequest(
                f"{length} tokens do not fit the {room} of the request's blocks; send the whole text with it"
            )
        return PagedCache(self._blocks, self._first, self.geometry.layers, length, placed, angles, positions)

    def place(self, kv_cache: FusedCache) -> None:
        """Write the stored KV of a cache into its request's pages, once. Raises DamagedEntry."""
        assert isinstance(kv_cache, PagedCache)
        if kv_cache.in_pages:
            return
        rows = kv_cache.placed
        if len(rows):
            slots = self.passes.slots(kv_cache.blocks, rows)
            g = self.geometry
            like = torch.empty(1, g.kv_heads, 0, g.head_width, dtype=g.dtype, device=g.device)
            for layer in range(g.layers):
                keys, values = (
                    each[0].transpose(0, 1)[rows] for each in kv_cache.layer_kv(layer, like)
                )  # (T, G, D)
                self.passes.write(layer, keys, values, slots)
        kv_cache.in_pages = True

    def compute(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: RowPlan,
        *,
        capture: bool = False,
        unrotated: bool = False,
    ) -> Tensor:
        assert isinstance(kv_cache, PagedCache)
        self.place(kv_cache)
        if int(plan.rows[0]) < kv_cache.first:
            plan = plan.subset(plan.rows[plan.rows >= kv_cache.first])
        request = RequestRows(plan.rows.cpu(), torch.tensor(token_ids), kv_cache.blocks)
        with self._shown(kv_cache, plan, capture, unrotated) as observe:
            hidden = self.passes.run([request], observe)
        model: Any = self.passes.model
        logits: Tensor = model.compute_logits(hidden[-1:])  # None on other ranks than the first
        return logits

    @contextmanager
    def _shown(self, kv_cache: PagedCache, plan: RowPlan, capture: bool, unrotated: bool) -> Iterator[Any]:
        """Return the observer that shows a pass to the plan's hooks and to the cache; None if nobody looks.

        Hooks that see `unrotated` rows may change the KV of others, which then goes to the pages before the layer attends.
        """
        kv_cache.capture = None
        if not capture and not plan.hooks:
            yield None
            return
        before = _BeforeRotation(self.passes.heads)
        if capture or unrotated:
            kv_cache.capture = RowCapture(before, self.geometry.layers, kv_cache.length, keep=capture)
        placed = kv_cache.placed if unrotated else plan.rows[:0].cpu()
        changed = placed[~torch.isin(placed, plan.rows.cpu())]
        slots = self.passes.slots(kv_cache.blocks, changed)

        def observe(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
            q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))  # (1, heads, T, D)
            k, v = kv_cache.layers[layer].update(k, v)
            plan.notify_hooks(AttentionCall(layer, q, k, v, self._settings[layer]))
            before.forget()  # a hook may have rotated keys of its own
            if len(changed):
                keys, values = (each[0].transpose(0, 1)[changed] for each in (k, v))
                self.passes.write(layer, keys, values, slots)

        with (
            torch.inference_mode(),
            kv_cache.writing(plan.rows),
            before.recording(self.rotation.modules if capture or unrotated else ()),
        ):
            yield observe

    def _find_rotary(self) -> list[nn.Module | None]:
        """Return the module that rotates each layer's keys, None for a layer without positions.

        Raises UnsupportedModel unless it gives, bit by bit, the keys with which the layer attends.
        """
        before = _BeforeRotation(self.passes.heads)
        rotary = [each for each in self.passes.model.modules() if isinstance(each, RotaryEmbeddingBase)]
        seen: list[tuple[nn.Module | None, Tensor, Tensor]] = []  # module, key before and after rotation

        def observe(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
            module, rotated = before.module, keys.transpose(0, 1)[None].clone()
            seen.append((module, before.unrotated_key(rotated), rotated))

        places = [
            torch.arange(PROBE_TOKENS, device=self.geometry.device) + first for first in (0, PROBE_TOKENS)
        ]
        for positions in places:
            with before.recording(rotary):
                self.passes.probe(positions, observe)
        near, far = seen[: self.geometry.layers], seen[self.geometry.layers :]
        for layer, (module, plain, rotated) in enumerate(near):
            if module is None and not torch.equal(rotated, far[layer][2]):
                raise UnsupportedModel("it rotates keys by other means than vLLM's rotary modules")
            if not torch.equal(_Angles([module], places[0]).rotate(0, plain), rotated):
                raise UnsupportedModel(
                    f"layer {layer} changes keys after rotating them, so that stored keys cannot be placed"
                )
        return [module for module, _, _ in near]


class _BeforeRotation:
    """Records the key that a rotary module is about to turn, (T, G · D), and the module, until the next layer asks for it."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self.module: nn.Module | None = None
        self._key: Tensor | None = None

    @contextmanager
    def recording(self, modules: Any) -> Iterator[None]:
        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            key = args[2] if len(args) > 2 else kwargs["key"]
            self.module, self._key = module, key.clone()  # some kernels turn it in place

        with ExitStack() as stack:
            for module in {each for each in modules if each is not None}:
                stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
            yield

    def forget(self) -> None:
        """Drop what was recorded since the last layer asked."""
        self.module, self._key = None, None

    def unrotated_key(self, rotated: Tensor) -> Tensor:
        """Return what a layer's rotated key (1, G, T, D), of all ranks, was before its rotation; the key itself if there was none."""
        key, self._key, self.module = self._key, None, None
        if key is None:
            return rotated
        return self._heads.whole_keys(key.reshape(len(key), -1, rotated.shape[-1])).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Rotates stored keys by the model's own modules, one for each layer, None for a layer without positions."""

    modules: Sequence[nn.Module | None]

    def angles(self, positions: Tensor, prompt_tokens: int, like: Tensor) -> "_Angles":
        return _Angles(self.modules, positions)


class _Angles:
    """The rotation to a run of positions (S,)."""

    def __init__(self, modules: Sequence[nn.Module | None], positions: Tensor) -> None:
        self._modules, self._positions = modules, positions

    def rotate(self, layer: int, keys: Tensor, start: int = 0) -> Tensor:
        """Return a layer's keys (1, G, S, D), rotated to the positions from index `start`; as `kvweave.models.rotary.Angles`."""
        module, (_, heads, tokens, width) = self._modules[layer], keys.shape
        if module is None or not tokens:
            return keys
        flat = keys[0].transpose(0, 1).reshape(tokens, heads * width).clone()
        turned: Tensor
        with torch.inference_mode():
            _, turned = module(self._positions[start : start + tokens], flat.new_zeros(tokens, width), flat)
        return turned.reshape(tokens, heads, width).transpose(0, 1)[None]
