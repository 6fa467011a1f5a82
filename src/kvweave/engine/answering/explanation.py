"""What became of every token of a prompt; runs only after the answer is there, for who asks."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvweave.engine.answering.answer_stream import Answered
from kvweave.results import ExplainedToken, Plan, TokenOrigin

_BROKEN = "\ufffd"  # what the bytes of an unfinished character decode to
_WINDOW_TOKENS = 8  # a tokenizer that looks at earlier tokens looks no further back


def explain(answered: Answered, tokenizer: Any) -> tuple[ExplainedToken, ...]:
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
    return tuple(map(ExplainedToken, ids, _texts(ids, tokenizer), origins, scores))


def _origins(plan: Plan, recomputed: frozenset[int]) -> Iterator[TokenOrigin]:
    for span in plan.spans:
        for position in range(span.start, span.end):
            yield "recomputed" if position in recomputed else span.origin


def _texts(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """Yield what each token adds to the decoded text; an unfinished character comes with the token that ends it."""
    done = 0  # tokens whose text was yielded
    for end in range(1, len(ids) + 1):
        start = max(0, done - _WINDOW_TOKENS)
        before, now = _decode(ids[start:done], tokenizer), _decode(ids[start:end], tokenizer)
        unfinished = now.endswith(_BROKEN) and end < len(ids) and end - done < _WINDOW_TOKENS
        if unfinished or not now.startswith(before):
            yield "" if unfinished else _decode(ids[done:end], tokenizer)
        else:
            yield now[len(before) :]
        if not unfinished:
            done = end


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)
