"""POST /v1/responses, for text. The server stores no response, so clients cannot fetch or continue one later."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from kvweave.config import GenerationConfig
from kvweave.results import AnswerCacheUse, Piece, TokenLogprob
from kvweave.server.errors import api_error
from kvweave.server.events import Encoder, sse
from kvweave.server.openai import replies
from kvweave.server.openai.fields import (
    ANY,
    NEUTRAL,
    Effort,
    Fields,
    MessageFields,
    NonEmpty,
    SampledFields,
    StreamOptions,
    Text,
    TextOr,
    Tokens,
    only_text,
    thinks,
)
from kvweave.server.services import ChoiceEvent, cache_use, check_model, services, start
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.types import Message

_LOGPROBS_INCLUDED = "message.output_text.logprobs"


class InputText(Fields):
    """A text part of a message."""

    neutral: ClassVar = {"annotations": (ANY,), "logprobs": (ANY,)}
    type: Annotated[
        Literal["input_text", "output_text"],
        BeforeValidator(lambda given: only_text(given, ("input_text", "output_text"))),
    ]
    text: Text


class InputMessage(MessageFields):
    """One message of the conversation so far."""

    neutral: ClassVar = {"id": (ANY,), "status": (ANY,), "phase": (ANY,)}
    type: Literal["message"] = "message"
    content: TextOr[Text, Annotated[list[InputText], Field(min_length=1)]]


class TextFormat(Fields):
    """The format of the text; only plain text is possible."""

    type: Literal["text"] = "text"


class TextOptions(Fields):
    """Options of the text."""

    neutral: ClassVar = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class Reasoning(Fields):
    """Options of a reasoning model."""

    neutral: ClassVar = {"summary": (), "generate_summary": ()}
    effort: Effort | None = None


class ResponseFields(SampledFields):
    """A request for a response."""

    neutral: ClassVar = {
        **NEUTRAL,
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (ANY,),
        "previous_response_id": (),
        "prompt": (),
        "tools": ([],),
        "truncation": ("disabled",),
    }
    input: TextOr[NonEmpty, Annotated[list[InputMessage], Field(min_length=1, max_length=10_000)]]
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[Text, Text] | None = None
    stream_options: StreamOptions | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, starting with the instructions."""
        if isinstance(self.input, str):
            found: tuple[Message, ...] = (Message("user", self.input),)
        else:
            found = tuple(each.message for each in self.input)
        return (Message("system", self.instructions), *found) if self.instructions else found

    def request(self, defaults: GenerationConfig, cache: AnswerCacheUse) -> CompletionRequest:
        """Return the request to complete; arguments as of `completion`."""
        wanted = self.top_logprobs is not None or _LOGPROBS_INCLUDED in (self.include or ())
        return self.completion(
            defaults,
            cache,
            messages=self.messages,
            max_new_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if wanted else None,
            think=thinks(self.reasoning.effort if self.reasoning else None),
        )


router = APIRouter()


@router.post("/v1/responses", response_class=JSONResponse)
async def responses(request: Request, fields: ResponseFields) -> Response:
    """Return the response to an input."""
    parts = services(request)
    check_model(fields.model, parts.model_name)
    built = ResponseObject(fields, parts.model_name)
    running = start(request, [fields.request(parts.config.generation, cache_use(request))])

    def body(events: Sequence[ChoiceEvent]) -> dict[str, Any]:
        (finished,) = replies.finished(events)
        return built.finished(finished, replies.tokens(events, 0))

    return await replies.reply(request, running, ResponseStream(built) if fields.stream else None, body)


class ResponseObject:
    """The response to one request; `model` is the name of the answering model."""

    def __init__(self, fields: ResponseFields, model: str) -> None:
        self.item_id = replies.new_id("msg_")
        self._head: dict[str, Any] = {
            "id": replies.new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": model,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": fields.top_p,
            "truncation": "disabled",
        }

    def unfinished(self) -> dict[str, Any]:
        """Return the response without an answer yet."""
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def failed(self, code: str | None, message: str) -> dict[str, Any]:
        """Return the failed response."""
        error = {"code": code or "server_error", "message": message}
        return {**self.unfinished(), "status": "failed", "error": error}

    def finished(self, finished: Finished, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the finished response, with the status `incomplete` if the answer reached its greatest length."""
        cut = finished.answer.finish_reason == "length"
        counted = replies.usage([finished])
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(self.part(finished.text, tokens), "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
            "timings": replies.timings(finished),
            "kvweave": replies.kvweave(finished),
        }

    def item(self, part: dict[str, Any] | None, status: str) -> dict[str, Any]:
        """Return the output message with its text part; with None, the message is still empty."""
        content = [] if part is None else [part]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def part(self, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [replies.token_logprob(each) for each in tokens]


class ResponseStream(Encoder):
    """Encodes a response as numbered events."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._in_message = False
        self._tokens: list[TokenLogprob] = []

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        if not self._number:
            for name in ("created", "in_progress"):
                yield self._send(f"response.{name}", response=self._response.unfinished())
        if isinstance(of.event, Piece):
            yield from self._begin_message()
            yield from self._delta(of.event)
        elif isinstance(of.event, Finished):
            yield from self._begin_message()
            yield from self._end_message(of.event)

    def failed(self, error: BaseException) -> Iterator[bytes]:
        found = api_error(error)
        yield self._send("response.failed", response=self._response.failed(found.code, found.message))

    def _begin_message(self) -> Iterator[bytes]:
        if self._in_message:
            return
        self._in_message = True
        item = self._response.item(None, "in_progress")
        yield self._send("response.output_item.added", output_index=0, item=item)
        yield self._in_part("response.content_part.added", part=self._response.part("", ()))

    def _delta(self, piece: Piece) -> Iterator[bytes]:
        self._tokens += piece.tokens
        if piece.text or piece.tokens:
            yield self._in_part(
                "response.output_text.delta", delta=piece.text, logprobs=_logprobs(piece.tokens)
            )

    def _end_message(self, finished: Finished) -> Iterator[bytes]:
        whole = self._response.finished(finished, self._tokens)
        (item,) = whole["output"]
        (part,) = item["content"]
        yield self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_part("response.content_part.done", part=part)
        yield self._send("response.output_item.done", output_index=0, item=item)
        yield self._send(f"response.{whole['status']}", response=whole)

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        return self._send(kind, item_id=self._response.item_id, output_index=0, content_index=0, **fields)

    def _send(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(data, kind)
