"""Decoding: from the first token's logits to a stream of text; where the KV lies meanwhile, `holding` knows."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from kvweave.config import GenerationConfig
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.decode_state import DecodeState, PersistentDecodeState
from kvweave.engine.speculative import PromptLookupDrafter, SpeculativeDecoder
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.types import Decoding


@dataclass(slots=True)
class Decoded:
    """What a generation has produced so far, and what it cost; `decoding` None where all KV stayed in memory.

    `accepted_draft_tokens` of the tokens were told by a draft or the prompt, and did not have to be decoded one by one.
    """

    text: str = ""
    ids: Sequence[int] = ()
    seconds: float = 0.0
    accepted_draft_tokens: int = 0
    decoding: Decoding | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.ids)


def generate(
    adapter: Adapter,
    kv_cache: FusedCache,
    prompt_ids: Sequence[int],
    logits: Tensor,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    *,
    kv: OffloadSettings | None = None,
    question_tokens: int = 1,
    drafts: Sequence[Sequence[int]] = (),
) -> Iterator[str]:
    """Yield the answer piece by piece, starting from the prompt's last logits (1, vocab).

    Continues on the canvas, which it grows, or on the flash that the canvas has handed its layers over to; with `kv`, it
    moves one that has not, of which `question_tokens` at the prompt's end are computed once more, see `enter`. Stops at the model's end-of-sequence tokens or after
    `max_new_tokens`. `drafts` are what the reply may be: as far as it is, or quotes the prompt, greedy decoding on a
    canvas runs many of its tokens in one pass, see `SpeculativeDecoder`. `decoded` is filled in as it goes, so it is right even
    when the caller stops early. Raises InvalidRequest, StoreError and StoreFull with `kv`.
    """
    with closing(DecodeState(adapter, kv_cache, kv)) as held:
        if max_new_tokens > 1:
            held.move(prompt_ids, question_tokens)
        source: DecodeState | SpeculativeDecoder = held
        if held.on_kv_cache and settings.temperature == 0:
            foretelling = PromptLookupDrafter(prompt_ids, drafts, settings.prompt_lookup_tokens)
            source = SpeculativeDecoder(adapter, held, len(prompt_ids), max_new_tokens, foretelling)
        reply = _Reply(adapter, source, prompt_ids, settings, max_new_tokens)
        try:
            yield from _pieces(reply, logits, decoded)
        finally:
            if isinstance(source, SpeculativeDecoder):
                source.stop(len(prompt_ids) + len(reply.ids))


def reply_on(
    adapter: Adapter,
    held: OffloadedCache,
    prompt_ids: Sequence[int],
    logits: Tensor,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    anew: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
) -> Generator[str, None, list[int]]:
    """As `generate`, on KV that stays its caller's and holds all of `prompt_ids`; returns the reply's token ids.

    All of these are held in the end, those of a reply that ran to `max_new_tokens` too, so that a text can go on: by
    `held`, or by what `anew` gave for it, see `PersistentDecodeState`.
    """
    standing = PersistentDecodeState(adapter, held, anew)
    reply = _Reply(adapter, standing, prompt_ids, settings, max_new_tokens)
    yield from _pieces(reply, logits, decoded)
    text = [*prompt_ids, *reply.ids]
    if standing.held.get_seq_length() < len(text):
        standing.advance(text)
    return reply.ids


def _pieces(reply: "_Reply", logits: Tensor, decoded: Decoded) -> Iterator[str]:
    """The reply's text as it grows from the prompt's last logits (1, vocab)."""
    shown = ""
    while True:
        began = time.perf_counter()
        if not reply.take(logits):
            break
        if reply.goes_on:
            logits = reply.advance()
        decoded.text = reply.text
        decoded.ids, decoded.seconds = reply.ids, decoded.seconds + time.perf_counter() - began
        decoded.accepted_draft_tokens = (
            reply.held.accepted_draft_tokens if isinstance(reply.held, SpeculativeDecoder) else 0
        )
        decoded.decoding = reply.held.cost
        # A character whose bytes are not all there yet decodes to U+FFFD: hold it back.
        ready = decoded.text.rstrip("\ufffd")
        if ready.startswith(shown):
            yield ready[len(shown) :]
            shown = ready
    if decoded.text.startswith(shown):
        yield decoded.text[len(shown) :]


def generate_together(
    adapter: Adapter,
    prefilled: Sequence[tuple[FusedCache, Sequence[int], Tensor]],
    settings: GenerationConfig,
    max_new_tokens: int,
) -> list[Decoded]:
    """Whole answers to several prompts, each given as in `generate` by canvas, token ids and last logits (1, vocab).

    A step of all that are not finished is one call of the model; `seconds` is each one's share of these.
    """
    replies = [
        _Reply(adapter, DecodeState(adapter, kv_cache), ids, settings, max_new_tokens)
        for kv_cache, ids, _ in prefilled
    ]
    seconds = [0.0] * len(replies)
    logits = dict(enumerate(first for _, _, first in prefilled))
    while logits:
        began = time.perf_counter()
        taken = [number for number, last in logits.items() if replies[number].take(last)]
        going = [number for number in taken if replies[number].goes_on]
        steps = _advance_together(adapter, [replies[number] for number in going])
        for number in logits:
            seconds[number] += (time.perf_counter() - began) / len(logits)
        logits = dict(zip(going, steps, strict=True))
    return [Decoded(reply.text, reply.ids, spent) for reply, spent in zip(replies, seconds, strict=True)]


class _Reply:
    """An answer in the making: the tokens chosen so far, all of them but the last in `held`."""

    def __init__(
        self,
        adapter: Adapter,
        held: DecodeState | PersistentDecodeState | SpeculativeDecoder,
        prompt_ids: Sequence[int],
        settings: GenerationConfig,
        most: int,
    ) -> None:
        self.ids: list[int] = []
        self.held = held
        self._adapter, self._prompt_ids, self._most = adapter, prompt_ids, most
        self._sampler = Sampler(settings, adapter.geometry.device)
        self._ends = end_tokens(adapter)

    def take(self, logits: Tensor) -> bool:
        """Choose the next token; False, and none chosen, where the answer ends."""
        if len(self.ids) >= self._most:
            return False
        token = self._sampler.choose(logits)
        if token in self._ends:
            return False
        self.ids.append(token)
        return True

    @property
    def goes_on(self) -> bool:
        """Whether there is room for another token."""
        return len(self.ids) < self._most

    @property
    def text(self) -> str:
        """What is there so far."""
        return str(self._adapter.tokenizer.decode(self.ids, skip_special_tokens=True)) if self.ids else ""

    @property
    def needs_rope_rescale(self) -> bool:
        """Whether the text needs other rotary frequencies than what is held has, and is computed again under them."""
        tokens = len(self._prompt_ids) + len(self.ids)
        return isinstance(self.held, DecodeState) and self.held.needs_rope_rescale(tokens)

    def advance(self) -> Tensor:
        """The logits behind the last token, (1, vocab)."""
        return self.held.advance([*self._prompt_ids, *self.ids])


def _advance_together(adapter: Adapter, replies: Sequence[_Reply]) -> list[Tensor]:
    """What `advance` gives for each, in one call where no text outgrows its canvas."""
    if any(reply.needs_rope_rescale for reply in replies):
        return [reply.advance() for reply in replies]
    kv_caches = [reply.held.kv_cache for reply in replies if isinstance(reply.held, DecodeState)]
    last = [reply.ids[-1] for reply in replies]
    return adapter.step_packed(list(zip(kv_caches, last, strict=True)))


def end_tokens(adapter: Adapter) -> frozenset[int]:
    """The tokens at which a model's answers end; none where neither model nor tokenizer names any."""
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
