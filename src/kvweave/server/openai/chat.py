"""POST /v1/chat/completions."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from kvweave.config import GenerationConfig
from kvweave.results import AnswerCacheUse, Piece, TokenLogprob
from kvweave.server.errors import ApiError
from kvweave.server.openai import replies
from kvweave.server.openai.fields import (
    ANY,
    NEUTRAL,
    ChoicesFields,
    Effort,
    Fields,
    MessageFields,
    Text,
    TextOr,
    Tokens,
    only_text,
    thinks,
)
from kvweave.server.serving.completions import CompletionRequest, Finished

_TASK: Final = re.compile(r"\s*(?:#+\s*)?Task:")
"""How a message begins that a chat page sends on its own: Open WebUI asks for titles, tags, queries and follow-up questions so.

It is no question of a user: its answer is not stored, and no questions are predicted from it.
"""


class TextPart(Fields):
    """A text part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(lambda given: only_text(given, ("text",)))]
    text: Text


class ChatMessage(MessageFields):
    """One message of the conversation."""

    neutral: ClassVar = {
        "name": (ANY,),
        "refusal": (),
        "audio": (),
        "tool_calls": ([],),
        "annotations": (ANY,),
    }
    content: TextOr[Text, Annotated[list[TextPart], Field(min_length=1)]]


class ChatFields(ChoicesFields):
    """A request for the next message of a conversation."""

    neutral: ClassVar = {
        **NEUTRAL,
        "audio": (),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logit_bias": ({},),
        "metadata": (ANY,),
        "modalities": (["text"],),
        "prediction": (),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=10_000)

    def requests(self, defaults: GenerationConfig, cache: AnswerCacheUse) -> list[CompletionRequest]:
        messages = tuple(each.message for each in self.messages)
        return [
            self.choice(
                index,
                defaults,
                "off" if _TASK.match(messages[-1].text) else cache,
                messages=messages,
                max_new_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                think=thinks(self.reasoning_effort),
            )
            for index in range(self.n or 1)
        ]


router = APIRouter()


@router.post("/v1/chat/completions", response_class=JSONResponse)
async def chat_completions(request: Request, fields: ChatFields) -> Response:
    """Return the next message of a conversation."""
    if fields.tools:
        _check_tools(request)
    head = {"id": replies.new_id("chatcmpl-"), "object": "chat.completion"}
    return await replies.reply_with_choices(request, fields, ChatStream, head, _choice)


def _choice(index: int, finished: Finished, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    answer = finished.answer
    thoughts = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {
        "index": index,
        "message": {"role": "assistant", "content": finished.text, "refusal": None, **thoughts},
        "logprobs": _logprobs(tokens),
        "finish_reason": answer.finish_reason,
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": [replies.token_logprob(each) for each in tokens], "refusal": None} if tokens else None


class ChatStream(replies.ChunkStream):
    """Encodes the next message of a conversation as chunks."""

    def __init__(self, fields: ChoicesFields, head: dict[str, Any]) -> None:
        super().__init__(fields, {**head, "object": "chat.completion.chunk"})
        self._started: set[int] = set()

    def begin(self, index: int) -> Iterator[bytes]:
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield self.chunk([{**self.choice(index), "delta": delta}])

    def choice(self, index: int, piece: Piece | None = None) -> dict[str, Any]:
        delta = {} if piece is None else {"content": piece.text}
        logprobs = None if piece is None else _logprobs(piece.tokens)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _check_tools(request: Request) -> None:
    """Raise ApiError for a request with tools, unless its URL names a knowledge base.

    Programs such as Open WebUI send their tools with every question. For a knowledge base the server ignores them: the model does
    not see them and calls none, which every client that leaves the choice to the model expects.
    """
    if "kb" not in request.path_params:
        raise ApiError(
            400, "tools: this server does not support it", code="unsupported_parameter", param="tools"
        )
