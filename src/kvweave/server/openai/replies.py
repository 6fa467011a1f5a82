"""The parts of replies that all routes with generated text share: usage, timings, the origin of the prompt's KV, headers."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvweave.results import Piece, Prefill, TokenLogprob, facts
from kvweave.server.events import DONE, Encoder, collect, error_event, sse, stream
from kvweave.server.openai.fields import ChoicesFields
from kvweave.server.running import RunningRequest
from kvweave.server.services import ChoiceEvent, cache_use, cache_used, check_model, services, shown, start
from kvweave.server.serving.completions import Finished

CACHE_HEADER: Final = "X-Kvweave-Cache"


def new_id(kind: str) -> str:
    """Return a random id in the API's form: the prefix `kind` and 24 hexadecimal digits."""
    return f"{kind}{secrets.token_hex(12)}"


async def reply(
    request: Request,
    running: Coroutine[Any, Any, RunningRequest],
    encoder: Encoder | None,
    body: Callable[[list[ChoiceEvent]], dict[str, Any]],
    until: Callable[[list[ChoiceEvent]], bool] | None = None,
) -> Response:
    """Start a request and return its reply: a stream if there is an `encoder`, else the `body` made from all events.

    The stream starts when the first events satisfy `until`; by default, when they show the source of the answer.
    """
    if encoder is not None:
        ping_s = services(request).config.server.ping_s
        return await stream(request, running, encoder, ping_s, until or cache_known, headers)
    events = await collect(request, running)
    return JSONResponse(body(events), headers=headers(events))


async def reply_with_choices(
    request: Request,
    fields: ChoicesFields,
    encoder: "type[ChunkStream]",
    head: dict[str, Any],
    choice: Callable[[int, Finished, list[TokenLogprob]], dict[str, Any]],
) -> Response:
    """Start all answers that `fields` ask for and return the reply with them.

    Args:
        encoder: encodes a stream.
        head: the id and the kind of the reply.
        choice: makes the part of the reply for one answer from its index and its tokens.
    """
    parts = services(request)
    check_model(fields.model, parts.model_name)
    head = {**head, "created": int(time.time()), "model": parts.model_name}

    def body(events: Sequence[ChoiceEvent]) -> dict[str, Any]:
        found = finished(events)
        return {
            **head,
            "choices": [choice(index, each, tokens(events, index)) for index, each in enumerate(found)],
            "usage": usage(found, fields.n or 1),
            "timings": timings(found[0]),
            "kvweave": kvweave(found[0]),
        }

    running = start(request, fields.requests(parts.config.generation, cache_use(request)))
    until = prompt_known if fields.return_progress else cache_known
    return await reply(request, running, encoder(fields, head) if fields.stream else None, body, until)


class ChunkStream(Encoder):
    """Encodes the answers of a request as OpenAI's chunks."""

    def __init__(self, fields: ChoicesFields, head: dict[str, Any]) -> None:
        self._fields, self._head, self._began_s = fields, head, time.perf_counter()
        self._finished: dict[int, Finished] = {}

    @abstractmethod
    def choice(self, index: int, piece: Piece | None = None) -> dict[str, Any]:
        """Return the part of a chunk for one answer, with a piece of its text if there is one."""

    def begin(self, index: int) -> Iterator[bytes]:
        """Yield the chunk before the text of an answer, if this has not been done."""
        yield from ()

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        index, event = of.index, of.event
        if isinstance(event, Prefill):
            if self._fields.return_progress and event.total_tokens:
                yield self.chunk([self.choice(index)], prompt_progress=_progress(event, self._began_s))
            return
        yield from self.begin(index)
        if isinstance(event, Piece):
            if event.text or event.tokens:
                yield self.chunk([self.choice(index, event)])
            return
        self._finished[index] = event
        choice = {**self.choice(index), "finish_reason": event.answer.finish_reason}
        yield self.chunk([choice], kvweave=kvweave(event), timings=timings(event))

    def end(self) -> Iterator[bytes]:
        """Yield the usage, if the client asked for it, and the mark of the end."""
        if self._fields.wants_usage:
            yield self.chunk([], usage=usage(_in_order(self._finished), self._fields.n or 1))
        yield DONE

    def failed(self, error: BaseException) -> Iterator[bytes]:
        yield error_event(error)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        unknown = {"usage": None} if self._fields.wants_usage else {}
        return sse({**self._head, "choices": choices, **unknown, **more})


def kvweave(finished: Finished) -> dict[str, Any]:
    """Return the plan, timing and sources of an answer, whether the sources support it, and what decoding read under a KV budget."""
    answer = finished.answer
    found = {
        "plan": facts(answer.plan),
        "timing": facts(answer.timing),
        "sources": [{**facts(each), "document": shown(each.document)} for each in answer.sources],
        "supported": answer.supported,
    }
    return found if answer.decoding is None else {**found, "decoding": facts(answer.decoding)}


def timings(finished: Finished) -> dict[str, Any]:
    """Return llama-server's figures: tokens and milliseconds of the answer, and of the prompt without cached tokens."""
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


def _progress(event: Prefill, began_s: float) -> dict[str, Any]:
    """Return llama-server's progress report of a prompt."""
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
    """Return the finished answers of a request in the order of their indices."""
    return _in_order({each.index: each.event for each in events if isinstance(each.event, Finished)})


def _in_order(found: Mapping[int, Finished]) -> list[Finished]:
    """Return finished answers in the order of their indices."""
    return [found[index] for index in sorted(found)]


def tokens(events: Sequence[ChoiceEvent], index: int) -> list[TokenLogprob]:
    """Return the tokens of one answer. Without log probabilities in the request the list is empty."""
    pieces = [each.event for each in events if each.index == index and isinstance(each.event, Piece)]
    return [token for piece in pieces for token in piece.tokens]


def headers(events: Sequence[ChoiceEvent]) -> dict[str, str]:
    """Return the headers with the source of the first answer; none while the events do not show it."""
    found = [used for each in events if each.index == 0 and (used := cache_used(each.event))]
    return {CACHE_HEADER: found[-1]} if found else {}


def usage(finished: Sequence[Finished], answers_per_prompt: int = 1) -> dict[str, Any]:
    """Return the token counts of a request; `finished` lists the answers to each prompt in a row, and a prompt counts once."""
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
    """Return whether the events show the source of the answer, which the headers name."""
    return bool(headers(events))


def prompt_known(events: Sequence[ChoiceEvent]) -> bool:
    """Return whether the prompt is assembled. From then on the request is not refused, and its progress can be shown."""
    return any(not isinstance(each.event, Prefill) or each.event.total_tokens for each in events)
