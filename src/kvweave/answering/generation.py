"""Decoding: from the first token's logits to a stream of text, with the log probabilities of its tokens if the caller wants them."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from kvweave.answering.answer_stream import WINDOW_TOKENS, token_text
from kvweave.answering.reply_reader import ReplyReader, ReplyText
from kvweave.answering.speculative import PromptLookupDrafter, SpeculativeDecoder
from kvweave.cancellation import check_cancelled
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import DecodeState, PersistentDecodeState, PlainDecodeState
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.models.adapter import Adapter
from kvweave.models.forward import check_logits
from kvweave.models.fused_cache import FusedCache
from kvweave.options import Sampling
from kvweave.recipes.request import PrefillResult
from kvweave.recipes.snapshots import SnapshotResult
from kvweave.remote.answer import RemoteAnswer
from kvweave.remote.model import AnyModel
from kvweave.results import DecodeStats, FinishReason, LikelyToken, TokenLogprob
from kvweave.types import ReplyFormat

_ANY_FORMAT = ReplyFormat()

Likelihoods = tuple[float, Sequence[tuple[int, float]]]
"""A token's log probability, and the likeliest tokens at its place with theirs, likeliest first."""


@dataclass(slots=True)
class Decoded:
    """What a generation has produced so far, and what it cost.

    Attributes:
        text: the answer.
        ids: the tokens of thoughts and answer. The last one may hold text behind the answer's end.
        seconds: the time that decoding took.
        accepted_draft_tokens: how many of the tokens came from a draft and were verified many in one pass.
        decoding: None if all KV stayed in memory.
        reasoning: a reasoning model's thoughts before the answer.
        finish_reason: stop, where the model ended the reply, or length.
        thinking: whether it ended inside the thoughts, so that there is no answer.
        piece_tokens: the tokens that came with the last piece of text, if log probabilities were asked for.
        counted_tokens: how many tokens vLLM has generated, if it answered.
        fallback_at: how many tokens were chosen before the prompt was computed in full; None if it was not.
    """

    text: str = ""
    ids: Sequence[int] = ()
    seconds: float = 0.0
    accepted_draft_tokens: int = 0
    decoding: DecodeStats | None = None
    reasoning: str = ""
    finish_reason: FinishReason = "stop"
    thinking: bool = False
    piece_tokens: tuple[TokenLogprob, ...] = ()
    counted_tokens: int | None = None
    fallback_at: int | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens, as vLLM counts them if it answered."""
        return len(self.ids) if self.counted_tokens is None else self.counted_tokens

    @property
    def missing_answer(self) -> str | None:
        """What to tell a user whose reply ended inside the thoughts; None otherwise."""
        if not self.thinking:
            return None
        return (
            f"the reply ended after {self.tokens} tokens, still inside the model's thoughts: there is no answer; allow more"
            " tokens (max_new_tokens), or turn thinking off if the model can (think)"
        )


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
    form: ReplyFormat = _ANY_FORMAT,
    stale: bool = False,
) -> Generator[str, None, None]:
    """Yield the answer piece by piece, from the prompt's last logits (1, vocab) on.

    Decoding extends `kv_cache`, or the file that the prefill streamed its layers to. Stops at the model's
    end-of-sequence tokens, where `form` says that an answer ends, or after `max_new_tokens`. Thoughts are not yielded.
    `decoded` is filled in on the way, so it is right even when the caller stops early.

    Args:
        kv: offload the KV first, where the prefill has not; the last `question_tokens` of the prompt are then computed
            again, see `offload`.
        drafts: token ids that the reply may consist of. Greedy decoding in memory verifies them, and quotes of the
            prompt, many in one pass; see `SpeculativeDecoder`.
        form: how the reply is read, `TokenizedPrompt.reply`; by default, it ends only where the model ends it.
        stale: whether some of the prompt's KV was computed in another context, so that `settings.fallback_margin` applies.

    Raises:
        ModelError: the model gave logits of NaN.
        InvalidRequest, StoreError, StoreFull: with `kv`.
    """
    with closing(DecodeState(adapter, kv_cache, kv)) as state:
        if max_new_tokens > 1:
            state.offload(prompt_ids, question_tokens)
        source: DecodeState | SpeculativeDecoder = state
        if state.in_memory and settings.temperature == 0:
            drafter = PromptLookupDrafter(prompt_ids, drafts, settings.prompt_lookup_tokens)
            source = SpeculativeDecoder(adapter, state, len(prompt_ids), max_new_tokens, drafter)
        reply = _Reply(adapter, source, prompt_ids, settings, max_new_tokens, form)
        if stale and state.in_memory and settings.temperature == 0:
            reply.fallback_margin = settings.fallback_margin
        try:
            yield from _pieces(reply, _choosing(reply, logits), decoded)
        finally:
            if state.in_memory:  # drafts, and tokens behind the answer's end
                state.kv_cache.truncate_appended(len(prompt_ids) + len(reply.ids))


def generate_from(
    result: PrefillResult,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    *,
    kv: OffloadSettings | None = None,
    drafts: Sequence[Sequence[int]] = (),
) -> Generator[str, None, None]:
    """Generate the reply to a prefilled prompt, as `generate` does."""
    prompt = result.request.prompt
    return generate(
        result.adapter,
        result.kv_cache,
        prompt.token_ids,
        result.logits,
        settings,
        max_new_tokens,
        decoded,
        kv=kv,
        question_tokens=prompt.spans[-1].tokens,
        drafts=drafts,
        form=prompt.reply,
        stale=result.plan.stale,
    )


def generate_all(
    result: PrefillResult,
    settings: GenerationConfig,
    max_new_tokens: int,
    *,
    kv: OffloadSettings | None = None,
) -> Decoded:
    """Generate the reply to a prefilled prompt as `generate` does, to its end."""
    decoded = Decoded()
    for _ in generate_from(result, settings, max_new_tokens, decoded, kv=kv):
        pass
    return decoded


def generate_plainly(
    prefilled: SnapshotResult,
    prompt_ids: Sequence[int],
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    form: ReplyFormat,
) -> Generator[str, None, None]:
    """Generate as `generate` does, token by token on the model's own cache, which this uses up."""
    adapter = prefilled.adapter
    state = PlainDecodeState(adapter, prefilled.state)
    reply = _Reply(adapter, state, prompt_ids, settings, max_new_tokens, form)
    yield from _pieces(reply, _choosing(reply, prefilled.logits), decoded)


def generate_remotely(
    answer: RemoteAnswer, settings: GenerationConfig, max_new_tokens: int, decoded: Decoded
) -> Generator[str, None, None]:
    """Hand on the reply that vLLM generates, read as `generate` reads one; raises as `RemoteModel.stream`."""
    prompt, model = answer.prompt, answer.model
    reply = _Reply(model, answer, prompt.token_ids, settings, max_new_tokens, prompt.reply)
    with closing(answer.tokens()) as tokens:

        def take() -> bool:
            token = next(tokens, None) if reply.unfinished else None
            if token is None:
                reply.end(answer.finish)
                return False
            return reply.accept(token.id, lambda count: (token.logprob or 0.0, token.likeliest[:count]))

        yield from _pieces(reply, take, decoded)
        if answer.finish is not None:  # what it cost comes last
            for _ in tokens:
                pass
    decoded.counted_tokens = answer.completion_tokens


def generate_in_conversation(
    adapter: Adapter,
    kv: OffloadedCache,
    prompt_ids: Sequence[int],
    logits: Tensor,
    settings: GenerationConfig,
    max_new_tokens: int,
    decoded: Decoded,
    recompute: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
    form: ReplyFormat = _ANY_FORMAT,
) -> Generator[str, None, list[int]]:
    """Generate as `generate` does, on KV that its caller owns and that holds all of `prompt_ids`; return the token ids.

    In the end the KV holds the reply too, so that the text can continue: `kv`, or what `recompute` returned for it,
    see `PersistentDecodeState`.
    """
    state = PersistentDecodeState(adapter, kv, recompute)
    reply = _Reply(adapter, state, prompt_ids, settings, max_new_tokens, form)
    yield from _pieces(reply, _choosing(reply, logits), decoded)
    state.hold([*prompt_ids, *reply.ids])
    return reply.ids


def _choosing(reply: "_Reply", logits: Tensor) -> Callable[[], bool]:
    """Return a function that chooses the next token, first from the prompt's last logits (1, vocab); False where the reply ends."""

    def take() -> bool:
        nonlocal logits
        logits = reply.certain(logits)
        taken = reply.take(logits)
        if taken and reply.unfinished:
            logits = reply.advance()
        return taken

    return take


def _pieces(reply: "_Reply", take: Callable[[], bool], decoded: Decoded) -> Iterator[str]:
    """Yield the reply's text as it grows by `take`, which returns False where it ends."""
    shown, taken = "", True
    while taken:
        check_cancelled()
        began = time.perf_counter()
        taken = take()
        read = reply.fill(decoded)
        decoded.seconds += time.perf_counter() - began
        if read.ready.startswith(shown):
            decoded.piece_tokens = reply.new_tokens(read.ready)
            yield read.ready[len(shown) :]
            shown = read.ready
    if decoded.text.startswith(shown):
        decoded.piece_tokens = reply.new_tokens(None)
        yield decoded.text[len(shown) :]


class _Reply:
    """An unfinished answer: the tokens chosen so far; all but the last one are in the KV of `state`."""

    def __init__(
        self,
        adapter: AnyModel,
        state: DecodeState | PersistentDecodeState | PlainDecodeState | SpeculativeDecoder | RemoteAnswer,
        prompt_ids: Sequence[int],
        settings: GenerationConfig,
        most: int,
        form: ReplyFormat,
    ) -> None:
        self.ids: list[int] = []
        self.state = state
        self.fallback_margin = 0.0
        self.fallback_at: int | None = None
        self._finished: FinishReason | None = None
        self._ended: ReplyText | None = None  # what the reply says, where its text has ended it
        self._adapter, self._prompt_ids, self._most = adapter, prompt_ids, most
        self._sampler = Sampler(settings, adapter.geometry.device)
        self._ends = end_tokens(adapter)
        stops, logprobs = (settings.stop, settings.logprobs) if isinstance(settings, Sampling) else ((), None)
        self._reader = ReplyReader(adapter.tokenizer, form, stops)
        self._recorder = None if logprobs is None else LogprobRecorder(adapter.tokenizer, logprobs)
        self._handed_out = 0  # tokens that `new_tokens` has returned

    def certain(self, logits: Tensor) -> Tensor:
        """Return the next token's logits (1, vocab): these, or full attention's where these are the first that leave it open."""
        if self.fallback_margin <= 0 or self.fallback_at is not None or not self.unfinished:
            return logits
        first, second = logits[0].topk(2).values.tolist()
        if first - second >= self.fallback_margin:
            return logits
        assert isinstance(self.state, DecodeState | SpeculativeDecoder)
        self.fallback_at = len(self.ids)
        return self.state.recompute([*self._prompt_ids, *self.ids])

    def take(self, logits: Tensor) -> bool:
        """Choose the next token; return False, and choose none, where the reply ends."""
        if not self.unfinished:
            return False
        check_logits(logits, self._adapter.fingerprint.name)
        token = self._sampler.choose(logits)
        return self.accept(token, partial(likelihoods, logits, token))

    def accept(self, token: int, likely: Callable[[int], Likelihoods]) -> bool:
        """Append a token; return False, and append none, if it ends the reply. `likely` is called if it is recorded."""
        if token in self._ends:
            self._finished = "stop"
            return False
        if self._recorder is not None:
            self._recorder.record(self.ids, token, likely)
        self.ids.append(token)
        if len(self.ids) >= self._most:
            self._finished = "length"
        if self._reader.may_end:
            read = self._reader.read(self.ids)
            if read.ended:
                self.ids, self._finished, self._ended = read.ids, "stop", read
        return True

    def end(self, reason: str | None) -> None:
        """Note that no token follows; `reason` is stop or length, None if that is known already."""
        if self._finished is None and reason is not None:
            self._finished = "stop" if reason == "stop" else "length"

    @property
    def unfinished(self) -> bool:
        """Whether another token may follow."""
        return self._finished is None and len(self.ids) < self._most

    def fill(self, decoded: Decoded) -> ReplyText:
        """Write what the reply says so far to `decoded`, and return it."""
        stopped = None if self._finished is None else self._finished == "stop"
        read = self._ended or self._reader.read(self.ids, stopped=stopped)
        decoded.text, decoded.reasoning, decoded.thinking = read.answer, read.thoughts, read.thinking
        decoded.ids, decoded.finish_reason = self.ids, self._finished or "length"
        decoded.decoding, decoded.fallback_at = self.state.cost, self.fallback_at
        if isinstance(self.state, SpeculativeDecoder):
            decoded.accepted_draft_tokens = self.state.accepted_draft_tokens
        return read

    def new_tokens(self, answer: str | None) -> tuple[TokenLogprob, ...]:
        """Return the recorded tokens of the beginning `answer` of the answer, None for all of it, that were not returned yet."""
        if self._recorder is None:
            return ()
        count = len(self.ids) if answer is None else self._reader.token_count(answer, self.ids)
        new = self._recorder.tokens[self._handed_out : count]
        self._handed_out = max(self._handed_out, count)
        return tuple(new)

    def advance(self) -> Tensor:
        """Return the logits after the last token, (1, vocab)."""
        assert not isinstance(self.state, RemoteAnswer)  # vLLM gives tokens, no logits
        return self.state.advance([*self._prompt_ids, *self.ids])


def end_tokens(adapter: AnyModel) -> frozenset[int]:
    """Return the tokens at which a model's answers end; none if nothing names any.

    Those of the generation config, the model's config, the tokenizer and the chat template: many models name a token in
    one place only.
    """
    model, tokenizer = adapter.model, adapter.tokenizer
    named = (
        model.generation_config.eos_token_id,
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    ends = [
        token for each in named for token in (each if isinstance(each, list) else [each]) if token is not None
    ]
    return adapter.template.end_tokens.union(ends)


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


def likelihoods(logits: Tensor, token: int, count: int) -> Likelihoods:
    """Return those of a token chosen by logits (1, vocab); the softmax is over the model's own logits, in float32."""
    logprobs = logits[0].float().log_softmax(dim=-1)  # (vocab,)
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    return float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True))


class LogprobRecorder:
    """Records a reply's tokens as they are chosen.

    Args:
        tokenizer: the model's.
        count: how many of the likeliest tokens to record at each place.
    """

    def __init__(self, tokenizer: Any, count: int) -> None:
        self._tokenizer, self._count = tokenizer, count
        self.tokens: list[TokenLogprob] = []

    def record(self, before: Sequence[int], token: int, likely: Callable[[int], Likelihoods]) -> None:
        """Record a token after the tokens `before`, of the reply alone; `likely` returns its `Likelihoods`."""
        logprob, others = likely(self._count)
        window = before[-WINDOW_TOKENS:]
        likeliest = tuple(LikelyToken(other, self._added(window, other), value) for other, value in others)
        self.tokens.append(TokenLogprob(token, self._added(window, token), logprob, likeliest))

    def _added(self, before: Sequence[int], token: int) -> str:
        """Return the text that a token adds to the text before it."""
        text, longer = (token_text(ids, self._tokenizer) for ids in (before, [*before, token]))
        return longer[len(text) :] if longer.startswith(text) else token_text([token], self._tokenizer)
