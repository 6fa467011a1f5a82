"""Decoding: from the first token's logits to a stream of text."""

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
from kvweave.engine.decode_state import DecodeState, PersistentDecodeState, PlainDecodeState
from kvweave.engine.speculative import PromptLookupDrafter, SpeculativeDecoder
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.models.snapshot_adapter import LoadedModel
from kvweave.recipes.snapshots import SnapshotResult
from kvweave.results import DecodeStats


@dataclass(slots=True)
class Decoded:
    """What a generation has produced so far, and what it cost.

    `accepted_draft_tokens` of the tokens came from a draft and were verified many in one pass. `decoding` is None if
    all KV stayed in memory.
    """

    text: str = ""
    ids: Sequence[int] = ()
    seconds: float = 0.0
    accepted_draft_tokens: int = 0
    decoding: DecodeStats | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
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
    """Yield the answer piece by piece, from the prompt's last logits (1, vocab) on.

    Decoding extends `kv_cache`, or the file that the prefill streamed its layers to. Stops at the model's
    end-of-sequence tokens or after `max_new_tokens`. `decoded` is filled in on the way, so it is right even when the
    caller stops early.

    Args:
        kv: offload the KV first, where the prefill has not; the last `question_tokens` of the prompt are then computed
            again, see `offload`.
        drafts: token ids that the reply may consist of. Greedy decoding in memory verifies them, and quotes of the
            prompt, many in one pass; see `SpeculativeDecoder`.

    Raises:
        InvalidRequest, StoreError, StoreFull: with `kv`.
    """
    with closing(DecodeState(adapter, kv_cache, kv)) as state:
        if max_new_tokens > 1:
            state.offload(prompt_ids, question_tokens)
        source: DecodeState | SpeculativeDecoder = state
        if state.in_memory and settings.temperature == 0:
            drafter = PromptLookupDrafter(prompt_ids, drafts, settings.prompt_lookup_tokens)
            source = SpeculativeDecoder(adapter, state, len(prompt_ids), max_new_tokens, drafter)
        reply = _Reply(adapter, source, prompt_ids, settings, max_new_tokens)
        try:
            yield from _pieces(reply, logits, decoded)
        finally:
            if isinstance(source, SpeculativeDecoder):
                source.stop(len(prompt_ids) + len(reply.ids))


def generate_plainly(
    prefilled: SnapshotResult,
    prompt_ids: Sequence[int],
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
) -> Iterator[str]:
    """Generate as `generate` does, token by token on the model's own cache, which this uses up."""
    adapter = prefilled.adapter
    reply = _Reply(adapter, PlainDecodeState(adapter, prefilled.state), prompt_ids, settings, max_new_tokens)
    yield from _pieces(reply, prefilled.logits, decoded)


def generate_in_conversation(
    adapter: Adapter,
    kv: OffloadedCache,
    prompt_ids: Sequence[int],
    logits: Tensor,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    recompute: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
) -> Generator[str, None, list[int]]:
    """Generate as `generate` does, on KV that its caller owns and that holds all of `prompt_ids`; return the token ids.

    In the end the KV holds the reply too, so that the text can continue: `kv`, or what `recompute` returned for it,
    see `PersistentDecodeState`.
    """
    state = PersistentDecodeState(adapter, kv, recompute)
    reply = _Reply(adapter, state, prompt_ids, settings, max_new_tokens)
    yield from _pieces(reply, logits, decoded)
    text = [*prompt_ids, *reply.ids]
    if state.kv.get_seq_length() < len(text):
        state.advance(text)
    return reply.ids


def _pieces(reply: "_Reply", logits: Tensor, decoded: Decoded) -> Iterator[str]:
    """Yield the reply's text as it grows from the prompt's last logits (1, vocab)."""
    shown = ""
    while True:
        began = time.perf_counter()
        if not reply.take(logits):
            break
        if reply.unfinished:
            logits = reply.advance()
        decoded.text = reply.text
        decoded.ids, decoded.seconds = reply.ids, decoded.seconds + time.perf_counter() - began
        decoded.accepted_draft_tokens = (
            reply.state.accepted_draft_tokens if isinstance(reply.state, SpeculativeDecoder) else 0
        )
        decoded.decoding = reply.state.cost
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
    """Generate answers to several prompts, each given as in `generate` by KV cache, token ids and last logits (1, vocab).

    One call of the model advances all unfinished replies; `seconds` is each one's share of these calls.
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
        going = [number for number in taken if replies[number].unfinished]
        steps = _advance_together(adapter, [replies[number] for number in going])
        for number in logits:
            seconds[number] += (time.perf_counter() - began) / len(logits)
        logits = dict(zip(going, steps, strict=True))
    return [Decoded(reply.text, reply.ids, spent) for reply, spent in zip(replies, seconds, strict=True)]


class _Reply:
    """An unfinished answer: the tokens chosen so far; all but the last one are in the KV of `state`."""

    def __init__(
        self,
        adapter: LoadedModel,
        state: DecodeState | PersistentDecodeState | PlainDecodeState | SpeculativeDecoder,
        prompt_ids: Sequence[int],
        settings: GenerationConfig,
        most: int,
    ) -> None:
        self.ids: list[int] = []
        self.state = state
        self._adapter, self._prompt_ids, self._most = adapter, prompt_ids, most
        self._sampler = Sampler(settings, adapter.geometry.device)
        self._ends = end_tokens(adapter)

    def take(self, logits: Tensor) -> bool:
        """Choose the next token; return False, and choose none, where the answer ends."""
        if len(self.ids) >= self._most:
            return False
        token = self._sampler.choose(logits)
        if token in self._ends:
            return False
        self.ids.append(token)
        return True

    @property
    def unfinished(self) -> bool:
        """Whether another token may follow."""
        return len(self.ids) < self._most

    @property
    def text(self) -> str:
        """The text so far."""
        return str(self._adapter.tokenizer.decode(self.ids, skip_special_tokens=True)) if self.ids else ""

    @property
    def needs_rope_rescale(self) -> bool:
        """Whether the text needs other rotary frequencies than its KV has, and is computed again under them."""
        tokens = len(self._prompt_ids) + len(self.ids)
        return isinstance(self.state, DecodeState) and self.state.needs_rope_rescale(tokens)

    def advance(self) -> Tensor:
        """Return the logits after the last token, (1, vocab)."""
        return self.state.advance([*self._prompt_ids, *self.ids])


def _advance_together(adapter: Adapter, replies: Sequence[_Reply]) -> list[Tensor]:
    """Advance each reply, in one call of the model unless a text has to be computed again."""
    if any(reply.needs_rope_rescale for reply in replies):
        return [reply.advance() for reply in replies]
    kv_caches = [reply.state.kv_cache for reply in replies if isinstance(reply.state, DecodeState)]
    last = [reply.ids[-1] for reply in replies]
    return adapter.step_packed(list(zip(kv_caches, last, strict=True)))


def end_tokens(adapter: LoadedModel) -> frozenset[int]:
    """Return the tokens at which a model's answers end; none if neither model nor tokenizer names any."""
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
        """Return the next token for logits (1, vocab)."""
        if self._greedy:
            return int(logits.argmax(dim=-1))
        empty = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        weights = self._warp(empty, logits.float()).softmax(dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._random))
