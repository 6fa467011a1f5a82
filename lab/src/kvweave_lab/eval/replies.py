"""Greedy replies to several prompts: one call of the model advances all that are unfinished."""

import time
from collections.abc import Sequence

from torch import Tensor

from kvweave.answering.generation import Decoded, end_tokens
from kvweave.answering.reply_reader import ReplyReader, ReplyText
from kvweave.decode.handoff import DecodeState
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.types import ReplyFormat

_ANY_FORMAT = ReplyFormat()


def generate_together(
    adapter: Adapter,
    prefilled: Sequence[tuple[FusedCache, Sequence[int], Tensor]],
    max_new_tokens: int,
    form: ReplyFormat = _ANY_FORMAT,
    begun: Sequence[Sequence[int]] | None = None,
) -> list[Decoded]:
    """Generate answers to several prompts, each given by KV cache, token ids and last logits (1, vocab).

    `seconds` of an answer is its share of the calls of the model. All are read as `form` says. With `begun`, each answer begins
    with the given tokens: its KV cache holds them behind the prompt, and its logits are those after them.
    """
    replies = [_Reply(adapter, kv_cache, ids, max_new_tokens, form) for kv_cache, ids, _ in prefilled]
    for reply, tokens in zip(replies, begun or (), strict=begun is not None):
        for token in tokens:
            reply.take(token)
    logits = {
        reply: last for reply, (_, _, last) in zip(replies, prefilled, strict=True) if not reply.finished
    }
    while logits:
        began = time.perf_counter()
        for reply, last in logits.items():
            reply.take(int(last.argmax()))
        going = [reply for reply in logits if not reply.finished]
        steps = _advance(adapter, going)
        for reply in logits:
            reply.seconds += (time.perf_counter() - began) / len(logits)
        logits = dict(zip(going, steps, strict=True))
    return [reply.decoded() for reply in replies]


class _Reply:
    """An answer so far; the KV of all its tokens but the last is in that of `state`."""

    def __init__(
        self, adapter: Adapter, kv_cache: FusedCache, prompt_ids: Sequence[int], most: int, form: ReplyFormat
    ) -> None:
        self.state, self.prompt_ids = DecodeState(adapter, kv_cache), prompt_ids
        self.ids: list[int] = []
        self.seconds = 0.0
        self.finished = self._stopped = False
        self._read: ReplyText | None = None
        self._most, self._ends = most, end_tokens(adapter)
        self._reader = ReplyReader(adapter.tokenizer, form)

    def take(self, token: int) -> None:
        """Append a token, unless it ends the answer."""
        if token in self._ends:
            self.finished = self._stopped = True
            return
        self.ids.append(token)
        self.finished = len(self.ids) >= self._most
        if self._reader.may_end and (read := self._reader.read(self.ids)).ended:
            self.ids, self._read = read.ids, read
            self.finished = self._stopped = True

    def decoded(self) -> Decoded:
        """The answer, after its last token."""
        read = self._read or self._reader.read(self.ids, stopped=self._stopped)
        return Decoded(
            read.answer,
            self.ids,
            self.seconds,
            reasoning=read.thoughts,
            thinking=read.thinking,
            finish_reason="stop" if self._stopped else "length",
        )


def _advance(adapter: Adapter, replies: Sequence[_Reply]) -> list[Tensor]:
    """Return the logits after each reply, from one call of the model unless a text has to be computed again."""
    tokens = [len(reply.prompt_ids) + len(reply.ids) for reply in replies]
    if any(reply.state.needs_rope_rescale(count) for reply, count in zip(replies, tokens, strict=True)):
        return [reply.state.advance([*reply.prompt_ids, *reply.ids]) for reply in replies]
    return adapter.step_packed([(reply.state.kv_cache, reply.ids[-1]) for reply in replies])
