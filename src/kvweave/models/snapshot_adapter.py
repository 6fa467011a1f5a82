"""A model that stored KV cannot be placed in, as kvweave uses it: run plainly, continued from stored states of its own cache.

A fused cache moves keys and values and writes into the middle of a prompt. A recurrent state cannot be moved, and transformers'
attention with sinks or compressed keys is not kvweave's. But the whole state after an exact prefix can be copied, stored and
continued from. That needs nothing but transformers' own calls, and gives the logits of full attention. transformers keeps such a
state in a `DynamicCache`: per layer keys and values, a convolution's last inputs, a recurrent state, or several of them.

`SnapshotAdapter` finds out by running the model whether that holds for it. Knows nothing of stores or recipes.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvweave.errors import UnsupportedModel
from kvweave.models.adapter import Adapter
from kvweave.models.fingerprint import ModelMemory, WatchedFingerprint
from kvweave.models.prompt import PromptTemplate, check_length
from kvweave.models.rotary import rope_regime
from kvweave.models.support import context_tokens
from kvweave.types import ModelFingerprint

_PROBE_TOKENS, _PROBE_PREFIX = 12, 7
_ALLOWED: Final = {4: 1e-3, 2: 0.1}
"""How far the logits of a pass in two parts may differ from those of one pass, as a share of the largest, by the bytes per
number of the model's dtype. Kernels of recurrent layers sum in another order."""

_KINDS: Final = ("keys", "values", "conv", "recurrent")
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

_CACHE_KEYWORDS: Final = ("past_key_values", "cache_params")
_STORED: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can read, and where and in which dtype it computes."""

    context_tokens: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class ModelState:
    """A cache and the number of tokens that it was computed from; a pass over more tokens changes both."""

    cache: DynamicCache
    tokens: int = 0


class SnapshotAdapter:
    """Wraps a loaded model and its tokenizer; the model is left as it is.

    One pass runs at a time; threads may share the object. Raises UnsupportedModel, naming the reason, if the model's state
    cannot be copied, or if the model does not continue from it.

    Attributes:
        reason: why stored KV cannot be placed in this model.
        fixed_bytes: size of a stored state, without what grows with the text.
        token_bytes: by how many bytes each token of the text lengthens it; layers with a window stop growing at its length.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reason: str, name: str = ""
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.reason = reason
        self.template = PromptTemplate(tokenizer)
        device = model.get_input_embeddings().weight.device
        text = model.config.get_text_config(decoder=True)
        self.geometry = Limits(context_tokens(text), model.dtype, device)
        self._lock = threading.RLock()
        self._accepted = inspect.signature(model.forward).parameters.keys()
        keywords = [keyword for keyword in _CACHE_KEYWORDS if keyword in self._accepted]
        if not keywords:
            raise UnsupportedModel("it takes no cache of transformers")
        self._cache_keyword = keywords[0]
        self.fixed_bytes, self.token_bytes = _probe(self)
        self._fingerprint = WatchedFingerprint(model, tokenizer, name or type(model).__name__)

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Names the weights and everything else that stored states depend on, as `check_weights` last found them."""
        return self._fingerprint.value

    def check_weights(self) -> ModelFingerprint:
        """Return the fingerprint, made anew if the weights were changed; called once in a request."""
        return self._fingerprint.check()

    def refusal(self, what: str) -> str:
        """Return the message that `what` does not work with this model, and what does."""
        return (
            f"{what} does not work with {self.fingerprint.name}, which answers single questions with recipe prefix alone "
            f"(--recipe prefix, or KVWEAVE_RECIPE=prefix for all commands): {self.reason}"
        )

    def new_state(self) -> ModelState:
        """Return the state before any token.

        Raises UnsupportedModel, naming the class, if a layer of the cache cannot be copied in and out.
        """
        cache = DynamicCache(config=self.model.config)
        for layer in cache.layers:
            if type(layer).__module__ != DynamicCache.__module__ or type(layer).__name__ not in _COPIED:
                raise UnsupportedModel(f"its cache has layers of class {type(layer).__name__}")
        return ModelState(cache)

    def extend(self, state: ModelState, token_ids: Sequence[int]) -> Tensor:
        """Run the model over tokens after those of the state; return the last one's logits, (1, vocab).

        Changes the state, which then includes these tokens.
        """
        ids = torch.tensor([list(token_ids)], device=self.geometry.device)
        end = state.tokens + ids.shape[1]
        keywords: dict[str, Any] = {self._cache_keyword: state.cache}
        if "position_ids" in self._accepted:
            # Some models count from 0 in every pass if they are not told.
            keywords["position_ids"] = torch.arange(state.tokens, end, device=ids.device)[None]
        with self._lock, torch.no_grad():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **keywords)
        state.tokens = end
        logits: Tensor = out.logits[:, -1]
        return logits

    def snapshot(self, state: ModelState) -> dict[str, Tensor]:
        """Return copies of a state's tensors on the CPU, by name: keys_0, values_0, conv_1_0, recurrent_1_0, ….

        Keys and values are (1, G, S, D), rotated as the model rotated them, of the last S tokens that the layer still sees.
        """
        return {name: tensor.detach().clone().cpu() for name, tensor in _tensors(state)}

    def snapshot_bytes(self, tokens: int) -> int:
        """Return the most bytes that a stored state after `tokens` tokens takes."""
        return self.fixed_bytes + tokens * self.token_bytes

    def restore(self, tensors: Mapping[str, Tensor], tokens: int) -> ModelState:
        """Return the state after `tokens` tokens from what `snapshot` has returned; the tensors given are copied."""
        state = self.new_state()
        found = {name: tensor.to(self.geometry.device) for name, tensor in tensors.items()}
        for number, layer in enumerate(state.cache.layers):
            if f"keys_{number}" in found:
                layer.update(found[f"keys_{number}"], found[f"values_{number}"])
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = tokens  # a window holds fewer
            if isinstance(layer, LinearAttentionLayer):
                _restore_linear(layer, number, found)
        state.tokens = tokens
        return state

    def check_length(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Raise PromptTooLong if prompt and answer do not fit the model's context; the message says by how much."""
        check_length(self.geometry.context_tokens, self.fingerprint.name, prompt_tokens, new_tokens)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so that a clock read afterwards is right."""
        if self.geometry.device.type == "cuda":
            torch.cuda.synchronize(self.geometry.device)


LoadedModel: TypeAlias = Adapter | SnapshotAdapter
"""A model as questions need it: one that stored KV can be placed in, or one that can be continued from exact prefixes alone."""


def adapt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, memory: ModelMemory | None = None
) -> LoadedModel:
    """Return the adapter of a model; raises UnsupportedModel, naming both reasons, if neither kind fits.

    `memory` is that of the files that the model was loaded from.
    """
    attention = model.config._attn_implementation
    try:
        return Adapter(model, tokenizer, name, memory)
    except UnsupportedModel as error:
        reason = str(error)
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)  # the model runs as it was loaded
    try:
        return SnapshotAdapter(model, tokenizer, reason, name)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{reason}. Its state cannot be stored either: {error}") from error


class Unfused(Protocol):
    """A model that stored KV cannot be placed in, in this process."""

    def refusal(self, what: str) -> str:
        """Return the message that `what` does not work with it, and what does."""


def fused(model: Adapter | Unfused, what: str = "this") -> Adapter:
    """Return the model if stored KV can be placed in it; raises UnsupportedModel: `what` does not work, and what does."""
    if isinstance(model, Adapter):
        return model
    raise UnsupportedModel(model.refusal(what))


# Finding out


def _probe(adapter: SnapshotAdapter) -> tuple[int, int]:
    """Return the fixed bytes of a stored state and its bytes per token; raises UnsupportedModel as the class says."""
    lengths = (1, adapter.geometry.context_tokens)
    if any(rope_regime(adapter.model.config, length) != "fixed" for length in lengths):
        raise UnsupportedModel("its rotary frequencies depend on the length of the whole text")
    vocabulary = adapter.model.config.get_text_config().vocab_size
    ids = [number % vocabulary for number in range(_PROBE_TOKENS)]
    try:
        return _run_probe(adapter, ids[:_PROBE_PREFIX], ids[_PROBE_PREFIX:])
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        why = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"it cannot continue from a copied state ({why})") from error


def _run_probe(adapter: SnapshotAdapter, first: Sequence[int], rest: Sequence[int]) -> tuple[int, int]:
    state = adapter.new_state()
    adapter.extend(state, first)
    stored = adapter.snapshot(state)
    others = {str(tensor.dtype) for tensor in stored.values() if tensor.dtype not in _STORED}
    if others:
        raise UnsupportedModel(f"its state has numbers of {', '.join(sorted(others))}")
    copied = adapter.restore(stored, state.tokens)
    unlike = differences(state, copied)
    if unlike:
        raise UnsupportedModel(f"a copy of its state differs in {', '.join(unlike[:3])}")
    if empty_layers(state):
        raise UnsupportedModel("it keeps a part of its state outside of its cache")
    _check_state_is_read(adapter, stored, len(first), rest)
    with torch.no_grad():
        ids = torch.tensor([[*first, *rest]], device=adapter.geometry.device)
        whole = adapter.model(input_ids=ids, use_cache=False).logits[:, -1]
    _check_logits("in two parts", adapter.extend(state, rest), whole)
    _check_logits("after a copied state", adapter.extend(copied, rest), whole)
    longer = adapter.snapshot(state)
    held, grown = (sum(tensor.nbytes for tensor in each.values()) for each in (stored, longer))
    token_bytes = (grown - held) // len(rest)
    return held - token_bytes * len(first), token_bytes


def _check_state_is_read(
    adapter: SnapshotAdapter, stored: Mapping[str, Tensor], tokens: int, rest: Sequence[int]
) -> None:
    """Raise UnsupportedModel unless every kind of tensor reaches the logits of a pass over several tokens.

    Such a pass of transformers' Mamba layers starts from nothing, whatever their state. The error would be small for most
    texts, and rounding could hide it, so the state is replaced by values that show wherever they go.
    """
    kinds = {kind for kind in _KINDS for name in stored if name.startswith(kind)}
    for kind in sorted(kinds):
        poisoned = {
            name: torch.full_like(tensor, torch.nan) if name.startswith(kind) else tensor
            for name, tensor in stored.items()
        }
        if not adapter.extend(adapter.restore(poisoned, tokens), rest).isnan().all():
            raise UnsupportedModel(
                f"a pass over several tokens does not read the {kind} state of its cache, so it would forget the prefix"
            )


def _check_logits(how: str, logits: Tensor, whole: Tensor) -> None:
    """Raise UnsupportedModel unless logits (1, vocab) equal those of an ordinary pass, but for rounding."""
    allowed = _ALLOWED.get(whole.dtype.itemsize, 1e-3) * float(whole.abs().max())
    difference = float((logits.float() - whole.float()).abs().max())
    if not difference <= allowed:  # nor NaN
        raise UnsupportedModel(
            f"its logits after a pass {how} differ by {difference:.1e} from those of one pass"
        )


# The tensors of a state


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
