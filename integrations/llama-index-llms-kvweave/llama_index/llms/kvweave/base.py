"""A language model in this process, whose prompts reuse stored KV."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from kvweave.errors import InvalidRequest
from kvweave.local import REUSE, LocalEngine, answer_facts, call_options, decoding_of, local_engine
from kvweave.results import Piece
from kvweave.types import Message

if TYPE_CHECKING:
    from kvweave.local import Finished

_ROLES: dict[MessageRole, Literal["system", "user", "assistant"]] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.CHATBOT: "assistant",
}


class Kvweave(CustomLLM):
    """Answers chats, from the caller's nodes or a knowledge base where a call or the model names them.

    With `documents` (LlamaIndex's nodes, or strings), each is a chunk of the prompt whose KV is reused wherever it comes in
    later prompts: `llm.chat(messages, documents=retriever.retrieve(question))`. With `kb` the last message is a question to
    that knowledge base, and its cached answers are used. Everything else reuses exact prefixes.

    Every field from `temperature` to `cache`, and `stop`, may be given to a call, too. Models with the same settings share what
    is loaded. Tools and images are refused.
    """

    model: str | None = None
    """Hub id or folder; None is the knowledge base's model, and without one the model that ships with kvweave."""
    kb: str | None = None
    """The knowledge base that answers; None for none."""
    home: str | None = None
    """Folder that holds everything; None is kvweave's own choice."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """More settings, as `kvweave.open` takes them."""
    temperature: float | None = None
    """0 is greedy; None leaves it to the settings, as with the other numbers."""
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    recipe: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    cache: Literal["use", "refresh", "off"] = "use"
    """What a question to a knowledge base does with the cached answers."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex stores such a model."""
        return "Kvweave"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's name and the lengths of its context and answers; loads the model."""
        engine = self._engine()
        return LLMMetadata(
            context_window=engine.context_tokens,
            num_output=self.max_tokens or engine.new_tokens,
            is_chat_model=True,
            model_name=engine.model_name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the next message of a chat."""
        *_, last = self._chat(self._engine(kwargs.get("kb")), messages, kwargs)
        return last.model_copy(update={"delta": None})

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield the next message of a chat as it grows."""
        return self._chat(self._engine(kwargs.get("kb")), messages, kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one message; `formatted` has no effect, since the model's own chat template is used."""
        return _completion(self.chat([ChatMessage(prompt)], **kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yield the answer to one message as it grows."""
        return (_completion(response) for response in self.stream_chat([ChatMessage(prompt)], **kwargs))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the next message of a chat, computed beside the event loop."""
        return await asyncio.to_thread(self.chat, messages, **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one message, beside the event loop."""
        return await asyncio.to_thread(self.complete, prompt, formatted, **kwargs)

    def _engine(self, kb: str | None = None) -> LocalEngine:
        return local_engine(kb or self.kb, self.home, **{**self.settings, "model": self.model})

    def _chat(
        self, engine: LocalEngine, messages: Sequence[ChatMessage], given: dict[str, Any]
    ) -> Generator[ChatResponse, None, None]:
        text = ""
        with closing(self._events(engine, messages, given)) as events:
            for event in events:
                text, delta = _grown(text, event)
                yield ChatResponse(
                    message=ChatMessage(role=MessageRole.ASSISTANT, content=text),
                    delta=delta,
                    raw=None if isinstance(event, Piece) else answer_facts(event),
                    additional_kwargs={} if isinstance(event, Piece) else _usage(event),
                )

    def _events(
        self, engine: LocalEngine, messages: Sequence[ChatMessage], given: dict[str, Any]
    ) -> "Generator[Piece | Finished, None, None]":
        """Begin a request with the options of a call, those that it leaves out as the model has them."""
        chosen = call_options(self, given, ["cache"], ["documents", "stop"])
        stop = chosen.get("stop") or ()
        return engine.complete(
            [_message(message) for message in messages],
            _documents(chosen.get("documents") or ()),
            decoding=decoding_of(chosen, (stop,) if isinstance(stop, str) else stop),
            cache=chosen["cache"],
            **{name: chosen[name] for name in REUSE},
        )


def _grown(text: str, event: "Piece | Finished") -> tuple[str, str]:
    """Return the text after an event, and what the event adds."""
    return (text + event.text, event.text) if isinstance(event, Piece) else (event.text, "")


def _message(message: ChatMessage) -> Message:
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"a message is of role {message.role.value!r}; kvweave takes system, user and assistant alone"
        )
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise InvalidRequest(f"a message has a {type(block).__name__}; kvweave reads text alone")
    return Message(
        _ROLES[message.role], "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    )


def _documents(given: Sequence[NodeWithScore | BaseNode | str]) -> list[tuple[str, str]]:
    """Return names and texts of retrieved nodes, in their order; their metadata are not part of the text."""
    found = []
    for number, each in enumerate(given, 1):
        node = each.node if isinstance(each, NodeWithScore) else each
        if isinstance(node, str):
            found.append((f"document {number}", node))
        else:
            found.append((node.node_id, node.get_content(MetadataMode.NONE)))
    return found


def _usage(finished: "Finished") -> dict[str, int]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "cached_tokens": finished.cached_tokens,
    }


def _completion(response: ChatResponse) -> CompletionResponse:
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
