"""Streams an answer, computed or cached, in pieces.

Imports no model code: a cached answer needs none. `explain` returns what happened to each prompt token.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any, NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.results import Answer, ExplainedToken, Piece, Plan, Prefill, TokenOrigin
from kvweave.types import TokenizedPrompt

if TYPE_CHECKING:
    from torch import Tensor


class Answered(NamedTuple):
    """A whole answer and what explains it.

    Attributes:
        answer: the answer.
        prompt: what it was computed from; empty for a cached answer.
        selected: the prompt positions (k,) that were recomputed; None for none.
        scores: the prompt positions (n,) that the recipe rated, and their scores (n,); None where it rated none.
        tokenizer: the model's; None for a cached answer.
    """

    answer: Answer
    prompt: TokenizedPrompt
    selected: "Tensor | None"
    scores: "tuple[Tensor, Tensor] | None" = None
    tokenizer: Any = None


Event = Prefill | Piece
Events = Generator[Event | Answered, None, None]
"""What a request yields. Its last event is the whole."""


class AnswerStream:
    """Iterate for the pieces of an answer; `answer` and `explain` are there once the iteration has ended.

    Args:
        events: what the request yields.
        request: closed when the iteration ends.
    """

    def __init__(self, events: Events, request: AbstractContextManager[object]) -> None:
        self._events = events
        self._request = request
        self._answered: Answered | None = None

    def __iter__(self) -> Iterator[str]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Piece):
                    yield event.text

    def events(self) -> Generator[Event, None, None]:
        """Iterate for the pieces and, before them, for how far the prompt is; instead of iterating for the text."""
        with self._request, closing(self._events):
            for event in self._events:
                if isinstance(event, Answered):
                    self._answered = event
                else:
                    yield event

    def close(self) -> None:
        """Give the answer up, if it is not finished, and free what it holds."""
        self._events.close()
        self._request.__exit__(None, None, None)

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        return self._finished.answer

    def explain(self) -> tuple[ExplainedToken, ...]:
        """Return every token of the prompt with the origin of its KV; raises as `answer` does."""
        return explain(self._finished)

    @property
    def _finished(self) -> Answered:
        if self._answered is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answered


_BROKEN = "\ufffd"  # what the bytes of an unfinished character decode to
WINDOW_TOKENS = 8  # a tokenizer that looks at earlier tokens looks no further back


def explain(answered: Answered) -> tuple[ExplainedToken, ...]:
    """Return one entry per prompt token, in order; the texts joined are the prompt's."""
    ids = answered.prompt.token_ids
    recomputed = frozenset(() if answered.selected is None else answered.selected.tolist())
    origins = _origins(answered.answer.plan, recomputed)
    scored = (
        {}
        if answered.scores is None
        else dict(zip(*(each.tolist() for each in answered.scores), strict=True))
    )
    scores = map(scored.get, range(len(ids)))
    return tuple(map(ExplainedToken, ids, _texts(ids, answered.tokenizer), origins, scores))


def _origins(plan: Plan, recomputed: frozenset[int]) -> Iterator[TokenOrigin]:
    for span in plan.spans:
        for position in range(span.start, span.end):
            yield "recomputed" if position in recomputed else span.origin


def _texts(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """Yield the text that each token adds; the token that completes a character brings the character."""
    done = 0  # tokens whose text was yielded
    for end in range(1, len(ids) + 1):
        start = max(0, done - WINDOW_TOKENS)
        before, now = token_text(ids[start:done], tokenizer), token_text(ids[start:end], tokenizer)
        unfinished = now.endswith(_BROKEN) and end < len(ids) and end - done < WINDOW_TOKENS
        if unfinished or not now.startswith(before):
            yield "" if unfinished else token_text(ids[done:end], tokenizer)
        else:
            yield now[len(before) :]
        if not unfinished:
            done = end


def token_text(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of tokens, control tokens and spaces as they are."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)
