"""`kvweave bench weights`: what fewer bits of the weights cost and save, beside llama.cpp.

All variants of a model are in memory at once and take turns: prefill, recomputation of chosen rows, decoding. Quality is
measured against the first variant on given text, where every token follows the text itself (teacher forcing).
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.quantised import quantised_modules
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.llama_cpp import LlamaCpp
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios, resident_bytes, trim_heap

_WINDOW = 256
"""Tokens of a piece of text; its first ones are predicted from little."""


@dataclass(frozen=True, slots=True)
class WeightsSettings:
    """What is measured.

    Attributes:
        prompt_tokens: length of the prompt.
        ratio: share of the prompt's rows that are recomputed.
        new_tokens: tokens decoded after it.
        rounds: how often everything is timed, in turn.
        text_tokens: most tokens of text that quality is measured on.
    """

    prompt_tokens: int = 512
    ratio: float = 0.15
    new_tokens: int = 32
    rounds: int = 5
    text_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a variant; `of_first` is its speed over the first variant's in the same rounds, above 1 if faster."""

    seconds: MedianRange
    of_first: MedianRange


@dataclass(frozen=True, slots=True)
class Quality:
    """How far next-token probabilities are from the first variant's.

    Attributes:
        tokens: how many predictions were compared.
        kl: mean KL divergence KL(first || this), in nats per token.
        kl_95: its 95th percentile.
        agreement: share of tokens with the same most likely next one.
    """

    tokens: int
    kl: float
    kl_95: float
    agreement: float


@dataclass(frozen=True, slots=True)
class VariantCost:
    """One way to hold a model's weights.

    Attributes:
        name: dtype or bits, or the name of a GGUF file.
        weight_bytes: of the weights as held, counted; of a GGUF file its size.
        resident_bytes: memory that was returned when the weights were dropped; for llama.cpp, what loading added, KV cache
            included. None where the system does not report it.
        prefill, recompute, decode: seconds per prompt, per pass over the chosen rows, and per token. llama.cpp recomputes
            no rows.
        quality: None for the first variant, for llama.cpp and without text.
    """

    name: str
    weight_bytes: int
    resident_bytes: int | None
    prefill: Speed
    recompute: Speed | None
    decode: Speed
    quality: Quality | None


@dataclass(frozen=True, slots=True)
class WeightsBench:
    """All variants of a model, the first one in full precision."""

    model: str
    threads: int
    settings: WeightsSettings
    variants: tuple[VariantCost, ...]


def bench_weights(
    model: str,
    load: Callable[[str], Adapter],
    names: Sequence[str],
    files: Sequence[Any],
    text: str,
    settings: WeightsSettings,
    progress: Progress = no_progress,
) -> WeightsBench:
    """Measure variants in turn.

    Args:
        model: its name, for the report.
        load: returns the model in a named variant.
        names: of variants; the others are compared with the first.
        files: paths of GGUF files of the same model.
        text: for quality; empty to leave that out.
        settings: what is measured.
        progress: is told of rounds.

    Raises what `load` raises; MissingExtra and ModelNotFound for `files`.
    """
    threads = torch.get_num_threads()
    taking_turns: list[_Variant | _Peer]
    variants = [_Variant(name, load(name), settings) for name in names]
    room = settings.prompt_tokens + settings.new_tokens + 8
    peers = [_Peer(LlamaCpp(path, room, threads), path, settings) for path in files]
    taking_turns = [*variants, *peers]
    for turn in range(settings.rounds + 1):  # the first warms up
        for each in taking_turns:
            each.measure(keep=turn > 0)
        progress("rounds", turn, settings.rounds)
    qualities = _qualities([each.adapter for each in variants], text, settings.text_tokens)
    first = variants[0]
    costs = [one.cost(first, quality) for one, quality in zip(variants, qualities, strict=True)]
    costs += [peer.cost(first) for peer in peers]
    return WeightsBench(model, threads, settings, tuple(costs))


class _Times:
    """Seconds by round, of one variant."""

    def __init__(self) -> None:
        self.prefill: list[float] = []
        self.recompute: list[float] = []
        self.decode: list[float] = []


class _Variant:
    """A loaded model, and its times."""

    def __init__(self, name: str, adapter: Adapter, settings: WeightsSettings) -> None:
        self.name, self.adapter, self._settings = name, adapter, settings
        self.times = _Times()
        self._ids = prompt_ids(adapter, settings.prompt_tokens)
        self._stored = adapter.encode(self._ids)
        count = max(1, round(settings.ratio * len(self._ids)))
        # Spread over the prompt, with the last row, as recipes choose them.
        self._rows = torch.linspace(0, len(self._ids) - 1, count + 1).long().unique()

    def measure(self, *, keep: bool) -> None:
        adapter, ids = self.adapter, self._ids
        fresh = adapter.new_cache(len(ids))
        prefill_s = elapsed_s(lambda: self._compute(fresh, torch.arange(len(ids))))
        stale = adapter.new_cache(len(ids), [PlacedSpan(self._stored, 0, 0)])
        recompute_s = elapsed_s(lambda: self._compute(stale, self._rows))
        began = time.perf_counter()
        for step in range(self._settings.new_tokens):
            adapter.step(fresh, ids[step % len(ids)])
        adapter.synchronize()
        decode_s = (time.perf_counter() - began) / self._settings.new_tokens
        if keep:
            self.times.prefill.append(prefill_s)
            self.times.recompute.append(recompute_s)
            self.times.decode.append(decode_s)

    def cost(self, first: "_Variant", quality: Quality | None) -> VariantCost:
        """Return the measurements of the variant, and drop its weights."""
        own, base = self.times, first.times
        return VariantCost(
            self.name,
            held_bytes(self.adapter.model),
            _dropped_bytes(self.adapter),
            _speed(own.prefill, base.prefill),
            _speed(own.recompute, base.recompute),
            _speed(own.decode, base.decode),
            quality,
        )

    def _compute(self, kv_cache: FusedCache, rows: Tensor) -> None:
        self.adapter.compute(kv_cache, self._ids, self.adapter.rows(rows))
        self.adapter.synchronize()


class _Peer:
    """A GGUF file in llama.cpp, and its times."""

    def __init__(self, llama: LlamaCpp, path: Any, settings: WeightsSettings) -> None:
        self._llama, self._path, self._settings = llama, path, settings
        self._times = _Times()

    def measure(self, *, keep: bool) -> None:
        ids = [100 + 7 * place % 5000 for place in range(self._settings.prompt_tokens)]
        prefill_s, token_s = self._llama.times(ids, self._settings.new_tokens)
        if keep:
            self._times.prefill.append(prefill_s)
            self._times.decode.append(token_s)

    def cost(self, first: _Variant) -> VariantCost:
        own, base = self._times, first.times
        return VariantCost(
            f"llama.cpp {self._path.name}",
            self._path.stat().st_size,
            self._llama.resident_bytes,
            _speed(own.prefill, base.prefill),
            None,
            _speed(own.decode, base.decode),
            None,
        )


def prompt_ids(adapter: Adapter, tokens: int) -> tuple[int, ...]:
    """Return a prompt of this length; times do not depend on its tokens. Raises InvalidRequest if the context is shorter."""
    if tokens > adapter.geometry.context_tokens:
        raise InvalidRequest(
            f"--prompt-tokens is {tokens}, beyond the model's context of {adapter.geometry.context_tokens}"
        )
    vocabulary = int(adapter.model.config.get_text_config().vocab_size)
    return tuple((3 + 7 * place) % vocabulary for place in range(tokens))


def _dropped_bytes(adapter: Adapter) -> int | None:
    """Drop a model's weights and return by how much the memory in use shrank; None where that cannot be known."""
    on_gpu = adapter.geometry.device.type == "cuda"
    used = torch.cuda.memory_allocated if on_gpu else resident_bytes
    trim_heap()
    before = used()
    for module in adapter.model.modules():
        module._parameters.clear()
        module._buffers.clear()
    for module in quantised_modules(adapter.model).values():
        module.packed = None
    gc.collect()
    trim_heap()
    return before - (used() or 0) if before else None


def _speed(own: Sequence[float], first: Sequence[float]) -> Speed:
    return Speed(MedianRange.of(own), paired_ratios(first, own))


def _qualities(adapters: Sequence[Adapter], text: str, most_tokens: int) -> list[Quality | None]:
    """Compare every model's next-token probabilities with the first one's, window by window."""
    if not text or len(adapters) < 2:
        return [None] * len(adapters)
    ids = torch.tensor(adapters[0].tokenizer(text)["input_ids"][:most_tokens])
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in adapters[1:]]
    for window in ids.split(_WINDOW):
        if window.numel() < 2:
            continue
        expected = _log_probabilities(adapters[0], window)
        for adapter, compared in zip(adapters[1:], found, strict=True):
            own = _log_probabilities(adapter, window)
            kl = torch.nn.functional.kl_div(own, expected, log_target=True, reduction="none").sum(-1)
            compared.append((kl, expected.argmax(-1) == own.argmax(-1)))
    return [None, *(_quality(compared) for compared in found)]


def _log_probabilities(adapter: Adapter, window: Tensor) -> Tensor:
    with torch.no_grad():
        logits = adapter.model(window[None].to(adapter.geometry.device), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def _quality(compared: Sequence[tuple[Tensor, Tensor]]) -> Quality | None:
    if not compared:
        return None
    kl = torch.cat([one for one, _ in compared])
    same = torch.cat([one for _, one in compared]).float()
    return Quality(kl.numel(), float(kl.mean()), float(kl.quantile(0.95)), float(same.mean()))


def held_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's weights as they are held; a shared weight once."""
    held = (*model.parameters(), *model.buffers())
    tensors = {each.data_ptr(): each for whole in held for each in _inner_tensors(whole)}
    packed = [getattr(each, "packed", None) for each in quantised_modules(model).values()]
    counted = [each.numel() * each.element_size() for each in tensors.values()]
    counted += [each.bytes for each in packed if each is not None]
    return sum(counted)


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the data: those inside of a packed one of torchao, else the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))
