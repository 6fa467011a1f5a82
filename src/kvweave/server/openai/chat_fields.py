"""The body of /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvweave.engine.answering.completions import CompletionRequest
from kvweave.results import AnswerCacheUse
from kvweave.server.openai.fields import (
    ANY,
    ChoicesFields,
    Fields,
    Role,
    Text,
    Tokens,
    sampling,
    stop_texts,
)
from kvweave.types import Message


class TextPart(Fields):
    """A part of a message's content; there are no others than text."""

    type: Literal["text"]
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
    content: Text | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def message(self) -> Message:
        """The message as the engine takes it."""
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
        """Return one engine's request per answer; `defaults` are the settings of generation."""
        shown = (self.top_logprobs or 0) if self.logprobs else None
        effort = self.reasoning_effort
        return [
            CompletionRequest(
                messages=tuple(each.message for each in self.messages),
                documents=self.caller_documents(),
                kb=self.kb,
                generation=sampling(
                    defaults,
                    most=self.max_completion_tokens or self.max_tokens,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=None if self.seed is None else self.seed + index,
                    stop=stop_texts(self.stop),
                    logprobs=shown,
                    think=None if effort is None else effort not in ("none", "minimal"),
                ),
                **self.options(cache),
            )
            for index in range(self.n or 1)
        ]
