"""POST /v1/chat/completions."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from kvweave.results import AnswerCacheUse, Piece, Prefill, TokenLogprob
from kvweave.server.errors import ApiError
from kvweave.server.events import DONE, error_event, sse
from kvweave.server.openai import replies
from kvweave.server.openai.fields import (
    ANY,
    AS_LIST,
    AS_TEXT,
    TEXT_OR_LIST,
    ChoicesFields,
    Fields,
    Role,
    Text,
    Tokens,
    only_text,
    sampling,
    stop_texts,
)
from kvweave.server.services import ChoiceEvent, cache_use, check_model, services, start
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.types import Message


class TextPart(Fields):
    """A text part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(lambda given: only_text(given, ("text",)))]
    text: Text


class ChatMessage(Fields):
    """One message of the conversation."""

    neutral: ClassVar = {
        "name": (ANY,),
        "refusal": (),
        "audio": (),
        "tool_calls": ([],),
        "annotations": (ANY,),
    }
    role: Role
    content: Annotated[
        Annotated[Text, AS_TEXT] | Annotated[list[TextPart], Field(min_length=1), AS_LIST], TEXT_OR_LIST
    ]

    @property
    def message(self) -> Message:
        """The message with its text joined and the role `developer` read as `system`."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role, parts)


class ChatFields(ChoicesFields):
    """A request for the next message of a conversation."""

    neutral: ClassVar = {
        "audio": (),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logit_bias": ({},),
        "metadata": (ANY,),
        "modalities": (["text"],),
        "parallel_tool_calls": (ANY,),
        "prediction": (),
        "presence_penalty": (0,),
        "prompt_cache_key": (ANY,),
        "prompt_cache_retention": (ANY,),
        "response_format": ({"type": "text"},),
        "safety_identifier": (ANY,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "user": (ANY,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=10_000)

    def requests(self, defaults: Any, cache: AnswerCacheUse) -> list[CompletionRequest]:
        """Return one request per answer; `defaults` are the settings of generation."""
        shown = (self.top_logprobs or 0) if self.logprobs else None
        effort = self.reasoning_effort
        return [
            CompletionRequest(
                messages=tuple(each.message for each in self.messages),
                documents=self.caller_documents(),
                kb=self.kb,
                options=self.options(
                    cache,
                    sampling(
                        defaults,
                        most=self.max_completion_tokens or self.max_tokens,
                        temperature=self.temperature,
                        top_p=self.top_p,
                        seed=None if self.seed is None else self.seed + index,
                        stop=stop_texts(self.stop),
                        logprobs=shown,
                        think=None if effort is None else effort not in ("none", "minimal"),
                    ),
                ),
            )
            for index in range(self.n or 1)
        ]


router = APIRouter()


@router.post("/v1/chat/completions", response_class=JSONResponse)
async def chat_completions(request: Request, fields: ChatFields) -> Response:
    """Return the next message of a conversation."""
    check_model(request, fields.model)
    if fields.tools:
        _check_tools(request)
    parts = services(request)
    wanted = fields.requests(parts.config.generation, cache_use(request))
    head = {"model": parts.model_name, "created": replies.now_s()}
    encoder = ChatStream(fields, head) if fields.stream else None
    until = replies.prompt_known if fields.return_progress else replies.cache_known
    running = start(request, wanted)
    return await replies.reply(request, running, encoder, lambda events: _completion(events, head), until)


def _completion(events: Sequence[ChoiceEvent], head: dict[str, Any]) -> dict[str, Any]:
    finished = replies.finished(events)
    return {
        "id": replies.new_id("chatcmpl-"),
        "object": "chat.completion",
        **head,
        "choices": [
            {
                "index": index,
                "message": _message(each),
                "logprobs": _logprobs(replies.tokens(events, index)),
                "finish_reason": each.answer.finish_reason,
            }
            for index, each in enumerate(finished)
        ],
        "usage": replies.usage(finished),
        "timings": replies.timings(finished[0]),
        "kvweave": replies.kvweave(finished[0]),
    }


def _message(finished: Finished) -> dict[str, Any]:
    answer = finished.answer
    thoughts = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": finished.text, "refusal": None, **thoughts}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": [replies.token_logprob(each) for each in tokens], "refusal": None} if tokens else None


class ChatStream:
    """Encodes the next message of a conversation as chunks."""

    def __init__(self, fields: ChatFields, head: dict[str, Any]) -> None:
        self._head = {"id": replies.new_id("chatcmpl-"), "object": "chat.completion.chunk", **head}
        self._fields, self._began_s = fields, time.perf_counter()
        self._started: set[int] = set()
        self._finished: dict[int, Finished] = {}

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        index, event = of.index, of.event
        if isinstance(event, Prefill):
            if self._fields.return_progress and event.total_tokens:
                progress = replies.prompt_progress(event, self._began_s)
                yield self._chunk([self._choice(index, {})], prompt_progress=progress)
            return
        if index not in self._started:
            self._started.add(index)
            yield self._chunk([self._choice(index, {"role": "assistant", "content": "", "refusal": None})])
        if isinstance(event, Piece):
            if event.text or event.tokens:
                choice = self._choice(index, {"content": event.text})
                yield self._chunk([{**choice, "logprobs": _logprobs(event.tokens)}])
            return
        yield from self._last_chunk(index, event)

    def end(self) -> Iterator[bytes]:
        """Yield the usage, if the client asked for it, and the mark of the end."""
        if self._fields.wants_usage:
            yield self._chunk([], usage=replies.usage(replies.in_order(self._finished)))
        yield DONE

    def failed(self, error: BaseException) -> Iterator[bytes]:
        yield error_event(error)

    def _last_chunk(self, index: int, finished: Finished) -> Iterator[bytes]:
        self._finished[index] = finished
        choice = self._choice(index, {})
        ours = {"kvweave": replies.kvweave(finished), "timings": replies.timings(finished)}
        yield self._chunk([{**choice, "finish_reason": finished.answer.finish_reason}], **ours)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        unknown = {"usage": None} if self._fields.wants_usage else {}
        return sse({**self._head, "choices": choices, **unknown, **more})


def _check_tools(request: Request) -> None:
    """Raise ApiError for a request with tools, unless its URL names a knowledge base.

    Programs such as Open WebUI send their tools with every question. For a knowledge base the server ignores them: the model does
    not see them and calls none, which every client that leaves the choice to the model expects.
    """
    if request.scope.get("kvweave.kb") is None:
        raise ApiError(
            400, "tools: this server does not support it", code="unsupported_parameter", param="tools"
        )
