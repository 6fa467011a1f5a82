"""The body of /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvweave.engine.answering.completions import CompletionRequest
from kvweave.results import AnswerCacheUse
from kvweave.server.openai.fields import (
    ANY,
    Fields,
    NonEmpty,
    Role,
    SampledFields,
    StreamOptions,
    Text,
    Tokens,
    sampling,
)
from kvweave.types import Message

LOGPROBS = "message.output_text.logprobs"


class InputText(Fields):
    """A part of a message; there are no others than text."""

    neutral: ClassVar = {"annotations": (ANY,), "logprobs": (ANY,)}
    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(Fields):
    """One message of the conversation so far."""

    neutral: ClassVar = {"id": (ANY,), "status": (ANY,), "phase": (ANY,)}
    type: Literal["message"] = "message"
    role: Role
    content: Text | Annotated[list[InputText], Field(min_length=1)]

    @property
    def message(self) -> Message:
        """The message as the engine takes it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return Message(role, self.content)
        return Message(role, "".join(part.text for part in self.content))


class TextFormat(Fields):
    """What form the text has: none."""

    type: Literal["text"] = "text"


class TextOptions(Fields):
    """How the text looks."""

    neutral: ClassVar = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class Reasoning(Fields):
    """Whether a reasoning model thinks first."""

    neutral: ClassVar = {"summary": (), "generate_summary": ()}
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseFields(SampledFields):
    """A request for a response."""

    neutral: ClassVar = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (ANY,),
        "parallel_tool_calls": (ANY,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_key": (ANY,),
        "prompt_cache_retention": (ANY,),
        "safety_identifier": (ANY,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncation": ("disabled",),
        "user": (ANY,),
    }
    input: NonEmpty | Annotated[list[InputMessage], Field(min_length=1, max_length=10_000)]
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
        """The conversation, the instructions first."""
        if isinstance(self.input, str):
            said: tuple[Message, ...] = (Message("user", self.input),)
        else:
            said = tuple(each.message for each in self.input)
        return (Message("system", self.instructions), *said) if self.instructions else said

    def request(self, defaults: Any, cache: AnswerCacheUse) -> CompletionRequest:
        """Return the engine's request; `defaults` are the settings of generation."""
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        effort = self.reasoning.effort if self.reasoning else None
        return CompletionRequest(
            messages=self.messages,
            documents=self.caller_documents(),
            kb=self.kb,
            generation=sampling(
                defaults,
                most=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                logprobs=(self.top_logprobs or 0) if wanted else None,
                think=None if effort is None else effort not in ("none", "minimal"),
            ),
            **self.options(cache),
        )
