"""How one question is answered: the options of the call, completed by the settings.

Recipes run models; their code is imported when a recipe is made.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvweave.answer_cache.records import AnswerSettings
from kvweave.answering.sampling import Sampling, check_sampling
from kvweave.config import (
    DEFAULT_NEW_TOKENS,
    DEFAULT_THINKING_TOKENS,
    Config,
    GenerationConfig,
)
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.recipes.names import AUTO, OWN_PREPARATIONS, UNCALIBRATED, displayed, full_name, parse
from kvweave.results import AnswerCacheUse
from kvweave.state.calibration_results import AutoRecipe

if TYPE_CHECKING:
    from kvweave.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of one call, as `KnowledgeBase.stream` describes them; None leaves an option to the settings."""

    recipe: str | None = None
    prepare: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    drop_chunks: bool = False
    cache: AnswerCacheUse = "use"
    generation: GenerationConfig | None = None

    @property
    def own_budget(self) -> bool:
        """Whether the call names a budget."""
        return self.ratio is not None or self.coverage is not None

    def keywords(self) -> dict[str, Any]:
        """Return them as the keywords of `KnowledgeBase.stream`."""
        return {each.name: getattr(self, each.name) for each in fields(CallOptions)}


_NOTHING_GIVEN: Final = CallOptions()


@dataclass(frozen=True, slots=True)
class AskOptions:
    """All options of one question: `Settings.resolve` completes those of the call. It travels to the pipeline unchanged.

    Attributes:
        recipe: how stored KV is reused.
        ratio, coverage: the recomputation budget, one of them or None; both None is the recipe's own.
        top_k: the number of chunks to retrieve.
        system: the instruction that the prompt starts with.
        generation: how the answer is decoded.
        kv: how KV is offloaded while the answer is decoded; None keeps all of it in memory.
        drop_chunks: whether the lowest-ranked chunks may be left out when the prompt is too long.
        cache: what to do with the answer cache.
        answer_settings: the settings under which the cache keeps the answer; None if it does not.
        keep_cut: whether the cache also keeps an answer that its greatest length cut.
        auto: why `auto` stands for the recipe; empty where a recipe was named.
    """

    recipe: "Recipe"
    ratio: float | None
    coverage: float | None
    top_k: int
    system: str
    generation: GenerationConfig
    kv: OffloadSettings | None
    drop_chunks: bool
    cache: AnswerCacheUse
    answer_settings: AnswerSettings | None
    keep_cut: bool = True
    auto: str = ""

    def max_new_tokens(self, context_tokens: int) -> int:
        """Return the longest answer in tokens by a model with a context of `context_tokens`."""
        default = DEFAULT_THINKING_TOKENS if self.generation.think else DEFAULT_NEW_TOKENS
        return within_context(self.generation.max_new_tokens, default, context_tokens)


@dataclass(frozen=True, slots=True)
class Settings:
    """Completes the options of a call with the settings of the knowledge base in `folder`.

    `auto` says what the recipe of that name stands for there; None where nothing is calibrated.
    """

    config: Config
    folder: Path
    auto: AutoRecipe | None = None

    def resolve(self, system: str, chunks: int, call: CallOptions = _NOTHING_GIVEN) -> AskOptions:
        """Return the options of one question.

        `chunks` is how many chunks the knowledge base holds: `top_k` is not more.

        Raises:
            UnknownRecipe, InvalidRequest: an option that cannot be honoured.
        """
        named = self._named(call.recipe, call.prepare, own_budget=call.own_budget)
        chosen = self._made(named, call.prepare)
        chosen.budget(call.ratio, call.coverage)  # an impossible budget is refused before a model is loaded
        if isinstance(call.generation, Sampling):
            check_sampling(call.generation)
        return AskOptions(
            recipe=chosen,
            ratio=call.ratio,
            coverage=call.coverage,
            top_k=min(self.top_k(call.top_k), chunks),
            system=system,
            generation=call.generation or self.config.generation,
            kv=self.offload(self.config.decoding.kv_budget),
            drop_chunks=call.drop_chunks,
            cache=call.cache,
            answer_settings=self.answer_settings(call),
            keep_cut=call.generation is None,  # a caller that limits one answer must be told that it was cut
            auto=named.told,
        )

    def answer_settings(self, call: CallOptions = _NOTHING_GIVEN) -> AnswerSettings | None:
        """Return what the answer cache keeps an answer under, None if it does not.

        `top_k` is the number asked for, however few chunks there are: documents that come in leave an answer where it is
        looked up. Makes no recipe if its name is known without. A budget is not checked: no answer is kept under an impossible one.
        """
        generation = call.generation or self.config.generation
        # A sampled answer is not the answer, and a cached one has no log probabilities.
        plain = generation.plain if isinstance(generation, Sampling) else generation.temperature == 0
        if call.cache == "off" or not plain:
            return None
        named = self._named(call.recipe, call.prepare, own_budget=call.own_budget)
        return AnswerSettings(
            self._recipe_name(named.recipe, call.prepare),
            named.ratio if call.ratio is None else call.ratio,
            call.coverage,
            self.top_k(call.top_k),
            generation.max_new_tokens,
            call.drop_chunks,
            self.config.model.auxiliary,
            self.config.decoding.kv_budget,
            generation.think,
            self.config.retrieval.reranker,
        )

    def restore(self, answer_settings: AnswerSettings, system: str, chunks: int) -> AskOptions:
        """Return the options that recorded `answer_settings` stand for, to compute a fresh answer under them.

        `chunks` is how many chunks the knowledge base holds.
        """
        from kvweave.recipes.methods import recipe_named

        recipe = recipe_named(answer_settings.recipe, None, answer_settings.auxiliary, self._storage)
        return AskOptions(
            recipe=recipe,
            ratio=answer_settings.ratio,
            coverage=answer_settings.coverage,
            top_k=min(answer_settings.top_k, chunks),
            system=system,
            generation=GenerationConfig(
                max_new_tokens=answer_settings.max_new_tokens, think=answer_settings.think
            ),
            kv=self.offload(answer_settings.kv_budget),
            drop_chunks=answer_settings.drop_chunks,
            cache="refresh",
            answer_settings=answer_settings,
        )

    def recipe(self, named: str | None = None, prepare: str | None = None) -> "Recipe":
        """Return the recipe of this name, or the settings'; `prepare` replaces its preparation.

        The settings' own preparation applies to recipes that prepare something and name no preparation.

        Raises:
            UnknownRecipe, InvalidRequest: see `recipe_named`.
        """
        return self._made(self._named(named, prepare), prepare)

    def _named(self, recipe: str | None, prepare: str | None, *, own_budget: bool = False) -> "_Named":
        """Return what a call or the settings name, with the verdict's choice in place of AUTO.

        A call's own budget goes to that choice, or to UNCALIBRATED if the choice spends none; its own preparation always goes
        to UNCALIBRATED: no verdict is about it.
        """
        name = self.config.recipe if recipe is None else recipe
        if name.rpartition("+")[2] != AUTO:
            return _Named(recipe)
        if name != AUTO or prepare is not None or self.auto is None:
            return _Named(recipe, told=f"{UNCALIBRATED}, which no verdict is about")
        calibration = self.auto.now()
        verdict = calibration.verdict
        if verdict is None:
            return _Named(recipe, told=calibration.told)
        if own_budget and not verdict.budget:
            stored = parse(verdict.recipe).storage
            name = displayed(UNCALIBRATED, None, stored)
            return _Named(name, told=f"{UNCALIBRATED} for this budget, else {calibration.told}")
        return _Named(verdict.recipe, None if own_budget else verdict.ratio, calibration.told)

    def _made(self, named: "_Named", prepare: str | None) -> "Recipe":
        from kvweave.recipes.methods import recipe_named
        from kvweave.recipes.prepare import NotPrepared

        auxiliary = self.config.model.auxiliary
        if named.recipe is None:
            return recipe_named(self.config.recipe, prepare or self.config.prepare, auxiliary, self._storage)
        chosen = recipe_named(named.recipe, prepare, auxiliary, self._storage)
        complete = prepare is not None or "+" in named.recipe or chosen.prepare == NotPrepared()
        if not complete:
            chosen = recipe_named(named.recipe, self.config.prepare, auxiliary, self._storage)
        return chosen if named.ratio is None else replace(chosen, ratio=named.ratio)

    def top_k(self, named: int | None = None) -> int:
        """Return the number of chunks to retrieve; raises InvalidRequest below one."""
        top_k = self.config.retrieval.top_k if named is None else named
        if top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least one chunk is needed")
        return top_k

    def offload(self, kv_budget: float | None) -> OffloadSettings | None:
        """Return how KV is offloaded under a budget and the settings' memory bound; None if it is not."""
        resident_bytes = self.config.decoding.resident_bytes
        if kv_budget is None and resident_bytes is None:
            return None
        # The files go beside the knowledge base: the system's temporary folder may be memory.
        folder = self.folder / "decoding"
        return OffloadSettings(1.0 if kv_budget is None else kv_budget, resident_bytes, folder=folder)

    def _recipe_name(self, named: str | None, prepare: str | None) -> str:
        """Return the name of `recipe`'s result."""
        if named is None:
            known = full_name(self.config.recipe, prepare or self.config.prepare, self._storage)
        else:
            complete = prepare is not None or "+" in named or OWN_PREPARATIONS.get(named) is None
            known = full_name(named, prepare if complete else self.config.prepare, self._storage)
        return known or self.recipe(named, prepare).name

    @property
    def _storage(self) -> str | None:
        storage = self.config.store.storage
        return None if storage == "auto" else storage


@dataclass(frozen=True, slots=True)
class _Named:
    """A recipe's name, None for the settings' own; the ratio that goes with it, None for its own; and why, for people."""

    recipe: str | None
    ratio: float | None = None
    told: str = ""


def within_context(given: int | None, default: int, context_tokens: int) -> int:
    """Return the length in tokens that is given, else the default, or an eighth of the model's context if that is less."""
    return given if given is not None else min(default, max(8, context_tokens // 8))
