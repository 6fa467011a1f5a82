"""The options of one question, and what an answer is cached under."""

import json
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Final, TypedDict

from kvweave.config import (
    DEFAULT_NEW_TOKENS,
    DEFAULT_THINKING_TOKENS,
    GenerationConfig,
    check_bounds,
)
from kvweave.errors import InvalidRequest
from kvweave.results import AnswerCacheUse

MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 16


@dataclass(frozen=True, slots=True)
class Sampling(GenerationConfig):
    """How one request's answer is decoded; `stop` and `logprobs` are no settings.

    Attributes:
        stop: the answer ends before the first of these texts.
        logprobs: how many alternatives to each token to return with their log probabilities, 0 for the token's own; None for
            none at all.
    """

    stop: tuple[str, ...] = ()
    logprobs: int | None = None


def completed_sampling(defaults: GenerationConfig, **given: Any) -> Sampling:
    """Return the sampling options of a request, with `defaults` (the settings) for those that are None."""
    return Sampling(**asdict(defaults) | {name: value for name, value in given.items() if value is not None})


def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidRequest, naming the value, if a request cannot be decoded so."""
    check_bounds(sampling)
    count, stops = sampling.logprobs, sampling.stop
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs is {count}; it must be between 0 and {MAX_LOGPROBS}")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{len(stops)} stop texts are given; at most {MAX_STOPS} are possible")
    if not all(stops):
        raise InvalidRequest("a stop text is empty; leave it out")


class AskKeywords(TypedDict, total=False):
    """The keywords of `KnowledgeBase.ask` and `stream`, described there. One that is None or absent is left to the settings."""

    recipe: str | None
    prepare: str | None
    ratio: float | None
    coverage: float | None
    top_k: int | None
    drop_chunks: bool
    kv_budget: float | None
    cache: AnswerCacheUse
    generation: GenerationConfig | None


@dataclass(frozen=True, slots=True)
class AskOptions:
    """All options of one question, as `Settings.options` completes them. They go to the pipeline unchanged.

    The answer cache keeps an answer with the options it was computed under. Read back, they hold what `cache_key` names, and
    the default of everything else.

    Attributes (the others are described at `KnowledgeBase.stream`):
        recipe: full name of the recipe.
        ratio: None for the recipe's own.
        auxiliary: the small model that some recipes select tokens with.
        kv_budget: what decoding attends to; None for everything. The memory it takes does not matter.
        reranker: the model that orders found chunks again; None without one.
        system: the instruction that the prompt starts with.
        keep_cut: whether the cache also keeps an answer that its greatest length cut.
        auto: why `auto` stands for the recipe; empty where a recipe was named.
    """

    recipe: str
    top_k: int
    _: KW_ONLY
    ratio: float | None = None
    coverage: float | None = None
    drop_chunks: bool = False
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    auxiliary: str | None = None
    kv_budget: float | None = None
    reranker: str | None = None
    system: str = ""
    cache: AnswerCacheUse = "use"
    keep_cut: bool = True
    auto: str = ""

    @property
    def cacheable(self) -> bool:
        """Whether the answer cache may give and keep the answer: one that is sampled or stopped, or has log probabilities, is not kept."""
        decoding = self.generation
        special = isinstance(decoding, Sampling) and (decoding.stop or decoding.logprobs is not None)
        return self.cache != "off" and decoding.temperature == 0 and not special

    def cache_key(self) -> str:
        """Return the text that the answer cache stores answers under. Equal keys may share an answer."""
        names = ("recipe", "ratio", "coverage", "top_k", "drop_chunks", "auxiliary", "kv_budget")
        values = {name: getattr(self, name) for name in names}
        values["max_new_tokens"] = self.generation.max_new_tokens
        # Keys without these were stored before there was a choice.
        if self.generation.think:
            values["think"] = True
        if self.generation.fallback_margin:
            values["fallback_margin"] = self.generation.fallback_margin
        if self.reranker is not None:
            values["reranker"] = self.reranker
        return json.dumps(values, sort_keys=True)

    @staticmethod
    def from_key(key: str) -> "AskOptions":
        """Return the options that a `cache_key` names."""
        values = json.loads(key)
        generation = GenerationConfig(
            max_new_tokens=values.pop("max_new_tokens"),
            fallback_margin=values.pop("fallback_margin", 0.0),
            think=values.pop("think", False),
        )
        return AskOptions(**values, generation=generation)

    def max_new_tokens(self, context_tokens: int) -> int:
        """Return the longest answer in tokens by a model with a context of `context_tokens`."""
        default = DEFAULT_THINKING_TOKENS if self.generation.think else DEFAULT_NEW_TOKENS
        return within_context(self.generation.max_new_tokens, default, context_tokens)


def within_context(given: int | None, default: int, context_tokens: int) -> int:
    """Return the length in tokens that is given, else the default, or an eighth of the model's context if that is less."""
    return given if given is not None else min(default, max(8, context_tokens // 8))
