"""A chat model in this process, whose prompts reuse stored KV."""

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field

from kvweave.local import DECODING, REUSE, LocalEngine, call_options, decoding_of, local_engine
from kvweave.results import Piece
from langchain_kvweave.messages import documents_from, message_from, metadata, usage

if TYPE_CHECKING:
    from kvweave.local import Finished


class ChatKvweave(BaseChatModel):
    """Answers chats, from the caller's documents or a knowledge base where a call or the model names them.

    With `documents` (LangChain's, or strings), each is a chunk of the prompt whose KV is reused wherever it comes in later
    prompts: `model.invoke(question, documents=retriever.invoke(question))`. With `kb` the last message is a question to that
    knowledge base, and its cached answers are used. Everything else reuses exact prefixes.

    `model`, `temperature`, `top_p`, `seed`, `max_tokens`, `kb`, `recipe`, `ratio`, `coverage`, `top_k` and `cache_use` may be given
    to a call, too. Models with the same settings share what is loaded. Tools, images and structured output are refused.
    """

    model: str | None = Field(default=None, alias="model_name")
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
    stop: list[str] | None = None
    """Texts before which the answer ends."""
    recipe: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    cache_use: Literal["use", "refresh", "off"] = "use"
    """What a question to a knowledge base does with the cached answers."""
    timeout: float | None = None
    """Seconds after which a request is given up: it then raises Cancelled."""
    max_retries: int | None = None
    """Has no effect: nothing is sent anywhere."""

    model_config = ConfigDict(populate_by_name=True)

    def _engine(self, given: dict[str, Any]) -> LocalEngine:
        """Return the engine of a call; one that names another model has that one loaded beside this model."""
        model, kb = given.pop("model", None) or self.model, given.get("kb") or self.kb
        return local_engine(kb, self.home, **{**self.settings, "model": model})

    @property
    def _llm_type(self) -> str:
        return "kvweave"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model", "kb", "home", "settings", "stop", *DECODING, *REUSE[1:])
        return {name: getattr(self, name) for name in names}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        given = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        return {"ls_model_name": "kvweave", **given, "ls_provider": "kvweave"}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = self._engine(kwargs)
        with closing(self._events(engine, messages, stop, kwargs)) as events:
            finished = next(event for event in events if not isinstance(event, Piece))
        message = AIMessage(
            content=finished.text,
            additional_kwargs=_thoughts(finished),
            response_metadata=metadata(finished, engine.model_name),
            usage_metadata=usage(finished),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self._engine(kwargs)
        with closing(self._events(engine, messages, stop, kwargs)) as events:
            for event in events:
                chunk = ChatGenerationChunk(message=_chunk(event, engine))
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _events(
        self, engine: LocalEngine, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> "Generator[Piece | Finished, None, None]":
        """Yield the pieces of an answer and at last the whole; gives up after `timeout`."""
        chosen = call_options(self, given, ["cache_use"], ["documents"])
        texts = [message_from(message) for message in messages]
        cancelled = threading.Event()
        timer = threading.Timer(self.timeout or 0.0, cancelled.set)
        if self.timeout is not None:
            timer.start()
        try:
            yield from engine.complete(
                texts,
                documents_from(chosen.get("documents") or ()),
                decoding=decoding_of(chosen, stop or self.stop or ()),
                cancelled=cancelled,
                cache=chosen["cache_use"],
                **{name: chosen[name] for name in REUSE},
            )
        finally:
            timer.cancel()


def _chunk(event: "Piece | Finished", engine: LocalEngine) -> AIMessageChunk:
    if isinstance(event, Piece):
        return AIMessageChunk(content=event.text)
    return AIMessageChunk(
        content="",
        additional_kwargs=_thoughts(event),
        response_metadata=metadata(event, engine.model_name),
        usage_metadata=usage(event),
        chunk_position="last",
    )


def _thoughts(finished: "Finished") -> dict[str, Any]:
    return {"reasoning_content": finished.answer.reasoning} if finished.answer.reasoning else {}
