"""Request fields that several routes share, and the handling of OpenAI's fields that have no effect here.

The server refuses a field that asks for something it cannot do. It ignores the field if the value asks for nothing.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from kvweave.config import GenerationConfig
from kvweave.options import AskKeywords, Sampling, completed_sampling
from kvweave.results import AnswerCacheUse
from kvweave.server.errors import BRANCHES
from kvweave.server.serving.completions import CallerDocument, CompletionRequest
from kvweave.types import Message

MOST_CHOICES: Final = 128
MOST_TOKENS: Final = 2**31 - 1
SMALLEST_TEMPERATURE: Final = 1e-3
"""Below this temperature, decoding is greedy."""

ANY: Final = object()
"""Marks a field whose every value is ignored."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "parallel_tool_calls": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "safety_identifier": (ANY,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "user": (ANY,),
}
"""Fields of chats and responses that are ignored, as `Fields.neutral` has them."""


def _unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can hold but no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "unicode", "the text is not valid Unicode: it has half of a surrogate pair"
        ) from None
    return text


Text = Annotated[str, StringConstraints(strict=True), AfterValidator(_unicode)]
NonEmpty = Annotated[str, StringConstraints(strict=True, min_length=1), AfterValidator(_unicode)]


Role = Literal["system", "developer", "user", "assistant"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_AS_TEXT, _AS_LIST = (Tag(branch) for branch in BRANCHES)


def _branch(given: Any) -> str | None:
    if isinstance(given, str):
        return _AS_TEXT.tag
    return _AS_LIST.tag if isinstance(given, list) else None


_T = TypeVar("_T")
_L = TypeVar("_L")
TextOr = Annotated[
    Annotated[_T, _AS_TEXT] | Annotated[_L, _AS_LIST],
    Discriminator(
        _branch, custom_error_type="text_or_list", custom_error_message="it must be text or a list"
    ),
]
"""`TextOr[text, list]`: a field that is validated as one of the two, so that an error message is about one form only."""


def refuse_token_ids(given: Any, hint: str = "") -> Any:
    """Return the value, or refuse it if it has token ids. Clients make those with another model's tokenizer."""
    if isinstance(given, list) and any(isinstance(each, int | list) for each in given):
        raise PydanticCustomError("token_ids", "it must be text, or a list of texts, not token ids" + hint)
    return given


def only_text(given: Any, accepted: tuple[str, ...]) -> Any:
    """Return the type of a message's part, or refuse an image, a sound or a file."""
    if isinstance(given, str) and given not in accepted:
        raise PydanticCustomError("unsupported", "content parts must be text")
    return given


class Fields(BaseModel):
    """A request's body. `neutral` names fields of OpenAI's API that are ignored, and the values with which they are accepted."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in given:
            if name in cls.neutral and not _is_neutral(given[name], cls.neutral[name]):
                error = PydanticCustomError("unsupported", "this server does not support it")
                details = InitErrorDetails(type=error, loc=(name,), input=None)
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return {name: value for name, value in given.items() if name not in cls.neutral}


class Document(Fields):
    """A chunk that the caller has retrieved."""

    id: NonEmpty
    text: NonEmpty


Share = Annotated[float, Field(ge=0, le=1)]
KVBudget = Annotated[float, Field(gt=0)]
"""Entries that a decoded token attends to: a share up to 1, a number above it."""


class KvweaveOptions(Fields):
    """Options for the reuse of stored KV. The settings apply where a field is left out."""

    recipe: Text | None = None
    prepare: Text | None = None
    ratio: Share | None = None
    coverage: Share | None = None
    top_k: Annotated[int, Field(ge=1, le=10_000)] | None = None
    kv_budget: KVBudget | None = None
    cache: AnswerCacheUse | None = None

    def options(self, cache: AnswerCacheUse, generation: Sampling) -> AskKeywords:
        """Return the fields as options of a request; `cache` comes from the headers and has precedence."""
        return {
            "recipe": self.recipe,
            "prepare": self.prepare,
            "ratio": self.ratio,
            "coverage": self.coverage,
            "top_k": self.top_k,
            "kv_budget": self.kv_budget,
            "cache": cache if cache != "use" else self.cache or "use",
            "generation": generation,
        }


class MessageFields(Fields):
    """One message of a conversation, whose content is text or parts with a text."""

    role: Role
    content: Any

    @property
    def message(self) -> Message:
        """The message with its text joined and the role `developer` read as `system`."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role, parts)


class StreamOptions(Fields):
    """Options of a stream."""

    neutral = {"include_obfuscation": (None, False)}
    include_usage: bool | None = None


class SampledFields(Fields):
    """The fields of all routes that generate text."""

    model: Text | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    documents: list[Document] | None = Field(None, max_length=10_000)
    kb: NonEmpty | None = None
    kvweave: KvweaveOptions | None = None

    def completion(
        self,
        defaults: GenerationConfig,
        cache: AnswerCacheUse,
        *,
        messages: tuple[Message, ...] = (),
        text: str | None = None,
        **decoding: Any,
    ) -> CompletionRequest:
        """Return the request for one answer to messages, or one that continues a text.

        `defaults` are the settings, `decoding` further arguments of `sampling`. `cache` comes from the headers and has precedence.
        """
        generation = sampling(defaults, temperature=self.temperature, top_p=self.top_p, **decoding)
        return CompletionRequest(
            messages=messages,
            text=text,
            documents=tuple(CallerDocument(each.id, each.text) for each in self.documents or ()),
            kb=self.kb,
            options=(self.kvweave or KvweaveOptions()).options(cache, generation),
        )


def sampling(defaults: GenerationConfig, **given: Any) -> Sampling:
    """Return the sampling options of a request as `completed_sampling` does, in the ranges that the engine takes."""
    chosen = completed_sampling(defaults, **given)
    return replace(
        chosen,
        temperature=0.0 if chosen.temperature < SMALLEST_TEMPERATURE else chosen.temperature,
        top_p=max(chosen.top_p, 1e-9),
        seed=None if chosen.seed is None else chosen.seed % 2**63,
    )


def thinks(effort: Effort | None) -> bool | None:
    """Return whether a model thinks with this effort; None leaves it to the settings."""
    return None if effort is None else effort not in ("none", "minimal")


Stop = TextOr[NonEmpty, Annotated[list[NonEmpty], Field(max_length=4)]] | None
Prompt = Annotated[
    TextOr[NonEmpty, Annotated[list[NonEmpty], Field(min_length=1, max_length=128)]],
    BeforeValidator(refuse_token_ids),
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]


class ChoicesFields(SampledFields):
    """The fields of the routes that can return several answers."""

    max_tokens: Tokens | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: Stop = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the client wants the usage at the end of a stream."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @abstractmethod
    def requests(self, defaults: GenerationConfig, cache: AnswerCacheUse) -> list[CompletionRequest]:
        """Return one request per answer, those of the first prompt first; arguments as of `completion`."""

    def choice(
        self, index: int, defaults: GenerationConfig, cache: AnswerCacheUse, **more: Any
    ) -> CompletionRequest:
        """Return the request for the answer of this index to a prompt; `more` are further arguments of `completion`."""
        seed = None if self.seed is None else self.seed + index
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return self.completion(defaults, cache, seed=seed, stop=stop, **more)


def _is_neutral(value: Any, accepted: tuple[Any, ...]) -> bool:
    return value is None or any(
        each is ANY or (each == value and isinstance(value, bool) == isinstance(each, bool))
        for each in accepted
    )
