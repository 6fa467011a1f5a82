"""What the replies of all routes that generate text say beside the text: usage, timings, and how the prompt got its KV."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvweave.facts import facts
from kvweave.results import Piece, Prefill, TokenLogprob
from kvweave.server.services import ChoiceEvent, cache_used
from kvweave.server.serving.completions import Finished
from kvweave.server.sources import shown

CACHE_HEADER: Final = "X-Kvweave-Cache"


def new_id(kind: str) -> str:
    """Return an id as the API gives them."""
    return f"{kind}{secrets.token_hex(12)}"


def now_s() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """Return the tokens of a request; its prompt counts once, however many answers it asks for."""
    return usage_of_prompts(finished, len(finished))


def kvweave(finished: Finished) -> dict[str, Any]:
    """Return how the prompt got its KV, where the time went, what the answer came from, and whether that holds it."""
    answer = finished.answer
    return {
        "plan": facts(answer.plan),
        "timing": facts(answer.timing),
        "sources": [{**facts(each), "document": shown(each.document)} for each in answer.sources],
        "supported": answer.supported,
    }


def timings(finished: Finished) -> dict[str, Any]:
    """Return llama-server's figures: tokens and milliseconds of the prompt, without those from a cache, and of the answer."""
    timing = finished.answer.timing
    computed = finished.prompt_tokens - finished.cached_tokens
    prompt_ms, predicted_ms = timing.ttft_s * 1e3, timing.decode_s * 1e3
    predicted = finished.completion_tokens
    return {
        "cache_n": finished.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if computed else 0.0,
        "prompt_per_second": computed / timing.ttft_s if timing.ttft_s else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": predicted / timing.decode_s if timing.decode_s else 0.0,
    }


def prompt_progress(event: Prefill, began_s: float) -> dict[str, Any]:
    """Return llama-server's report of a prompt that is not computed yet."""
    return {
        "total": event.total_tokens,
        "cache": event.cached_tokens,
        "processed": event.done_tokens,
        "time_ms": int((time.perf_counter() - began_s) * 1e3),
    }


def token_logprob(token: TokenLogprob) -> dict[str, Any]:
    """Return a token's log probability as the chat and responses routes write it."""
    return {
        **_token(token.text, token.logprob),
        "top_logprobs": [_token(each.text, each.logprob) for each in token.likeliest],
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def finished(events: Sequence[ChoiceEvent]) -> list[Finished]:
    """Return the whole answers of a request, by their index."""
    return in_order({each.index: each.event for each in events if isinstance(each.event, Finished)})


def in_order(found: Mapping[int, Finished]) -> list[Finished]:
    """Return whole answers in the order of their indices; they may have ended in any."""
    return [found[index] for index in sorted(found)]


def tokens(events: Sequence[ChoiceEvent], index: int) -> list[TokenLogprob]:
    """Return the tokens of one answer, if log probabilities were asked for."""
    pieces = [each.event for each in events if each.index == index and isinstance(each.event, Piece)]
    return [token for piece in pieces for token in piece.tokens]


def headers(events: Sequence[ChoiceEvent]) -> dict[str, str]:
    """Return the headers that say where the first answer came from, as far as these events tell."""
    told = [used for each in events if each.index == 0 and (used := cache_used(each.event))]
    return {CACHE_HEADER: told[-1]} if told else {}


def usage_of_prompts(finished: Sequence[Finished], answers_per_prompt: int) -> dict[str, Any]:
    """Return the tokens of a request with several prompts, each with this many answers in a row."""
    firsts = finished[::answers_per_prompt]
    prompts, cached = sum(each.prompt_tokens for each in firsts), sum(each.cached_tokens for each in firsts)
    completion = sum(each.completion_tokens for each in finished)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cache_known(events: Sequence[ChoiceEvent]) -> bool:
    """Whether the headers can say where the answer comes from."""
    return bool(headers(events))


def prompt_known(events: Sequence[ChoiceEvent]) -> bool:
    """Whether the prompt is assembled, so that it is no longer refused; its progress can be shown."""
    return any(not isinstance(each.event, Prefill) or each.event.total_tokens for each in events)
