"""Decoding: from the first token's logits to a stream of text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from kvweave.config import GenerationConfig
from kvweave.models.adapter import Adapter
from kvweave.models.canvas import Canvas


@dataclass(slots=True)
class Decoded:
    """What a generation has produced so far, and what it cost."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0


def generate(
    adapter: Adapter,
    canvas: Canvas,
    prompt_ids: Sequence[int],
    logits: Tensor,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
) -> Iterator[str]:
    """Yield the answer piece by piece, starting from the prompt's last logits (1, vocab).

    Continues on the canvas, which it grows. Stops at the model's end-of-sequence tokens or after
    `max_new_tokens`. `decoded` is filled in as it goes, so it is right even when the caller stops early.
    """
    sampler = Sampler(settings, adapter.geometry.device)
    ends = _end_tokens(adapter)
    ids: list[int] = []
    shown = ""
    while len(ids) < max_new_tokens:
        began = time.perf_counter()
        token = sampler.choose(logits)
        if token in ends:
            break
        ids.append(token)
        if len(ids) < max_new_tokens:
            canvas, logits = _advance(adapter, canvas, [*prompt_ids, *ids])
        decoded.text = adapter.tokenizer.decode(ids, skip_special_tokens=True)
        decoded.tokens, decoded.seconds = len(ids), decoded.seconds + time.perf_counter() - began
        # A character whose bytes are not all there yet decodes to U+FFFD: hold it back.
        ready = decoded.text.rstrip("\ufffd")
        if ready.startswith(shown):
            yield ready[len(shown) :]
            shown = ready
    if decoded.text.startswith(shown):
        yield decoded.text[len(shown) :]


def _advance(adapter: Adapter, canvas: Canvas, ids: list[int]) -> tuple[Canvas, Tensor]:
    """The logits that follow `ids`, whose last token the canvas does not hold yet."""
    if not adapter.outgrows(len(ids)):
        return canvas, adapter.step(canvas, ids[-1])
    anew = adapter.canvas(len(ids))
    return anew, adapter.compute(anew, ids, adapter.rows(torch.arange(len(ids))))


def _end_tokens(adapter: Adapter) -> frozenset[int]:
    ends = adapter.model.generation_config.eos_token_id
    if ends is None:
        ends = adapter.tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


class Sampler:
    """Greedy at temperature 0; otherwise the library's own temperature and nucleus warpers, seeded."""

    def __init__(self, settings: GenerationConfig, device: torch.device) -> None:
        self._greedy = settings.temperature == 0
        self._warp = LogitsProcessorList()
        if not self._greedy:
            self._warp.append(TemperatureLogitsWarper(settings.temperature))
            if settings.top_p < 1:
                self._warp.append(TopPLogitsWarper(settings.top_p))
        self._random = torch.Generator(device)
        if settings.seed is not None:
            self._random.manual_seed(settings.seed)
        elif not self._greedy:
            self._random.seed()

    def choose(self, logits: Tensor) -> int:
        """The next token for logits (1, vocab)."""
        if self._greedy:
            return int(logits.argmax(dim=-1))
        empty = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        weights = self._warp(empty, logits.float()).softmax(dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._random))
