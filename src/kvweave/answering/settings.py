"""Completes the options of one question by the settings, and makes the recipe that they name.

Recipes run models; their code is imported when a recipe is made.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.config import TRANSFORMERS, Config, GenerationConfig
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.options import AskOptions, Sampling, check_sampling
from kvweave.recipes.names import AUTO, UNCALIBRATED, displayed, full_name, own_preparation, parse
from kvweave.results import AnswerCacheUse
from kvweave.state.calibration_results import AutoRecipe

if TYPE_CHECKING:
    from kvweave.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the knowledge base in `folder`, for questions.

    `auto` resolves the recipe of that name; None where nothing is calibrated.
    """

    config: Config
    folder: Path
    auto: AutoRecipe | None = None

    def options(
        self,
        system: str = "",
        /,
        *,
        recipe: str | None = None,
        prepare: str | None = None,
        ratio: float | None = None,
        coverage: float | None = None,
        top_k: int | None = None,
        drop_chunks: bool = False,
        kv_budget: float | None = None,
        cache: AnswerCacheUse = "use",
        generation: GenerationConfig | None = None,
    ) -> AskOptions:
        """Return the options of one question after the instruction `system`; None leaves an option to the settings.

        Makes no recipe if its name is known without, and does not check the budget: no answer is cached under an impossible one.

        Raises:
            UnknownRecipe, InvalidRequest: an option that cannot be honoured.
        """
        named = self._named(recipe, prepare, own_budget=ratio is not None or coverage is not None)
        if isinstance(generation, Sampling):
            check_sampling(generation)
        return AskOptions(
            self._recipe_name(named.recipe, prepare),
            self.top_k(top_k),
            ratio=named.ratio if ratio is None else ratio,
            coverage=coverage,
            drop_chunks=drop_chunks,
            generation=generation or self.config.generation,
            auxiliary=self.config.model.auxiliary,
            kv_budget=self.config.decoding.kv_budget if kv_budget is None else kv_budget,
            reranker=self.config.retrieval.reranker,
            system=system,
            cache=cache,
            keep_cut=generation is None,  # a caller that limits one answer must be told that it was cut
            auto=named.reason,
        )

    def recipe_of(self, options: AskOptions) -> "Recipe":
        """Return the recipe that options name, with their ratio; raises InvalidRequest for an impossible budget."""
        from kvweave.recipes.methods import recipe_named

        recipe = recipe_named(options.recipe, None, options.auxiliary, self._storage)
        recipe.budget(options.ratio, options.coverage)
        return self._for_engine(recipe if options.ratio is None else replace(recipe, ratio=options.ratio))

    def recipe(self, named: str | None = None, prepare: str | None = None) -> "Recipe":
        """Return the recipe of this name, or the settings'; `prepare` replaces its preparation.

        The settings' own preparation applies to recipes that prepare something and name no preparation.

        Raises:
            UnknownRecipe, InvalidRequest: see `recipe_named`.
        """
        from kvweave.recipes.methods import recipe_named
        from kvweave.recipes.prepare import NotPrepared

        found, auxiliary = self._named(named, prepare), self.config.model.auxiliary
        if found.recipe is None:
            own = recipe_named(self.config.recipe, prepare or self.config.prepare, auxiliary, self._storage)
            return self._for_engine(own)
        chosen = recipe_named(found.recipe, prepare, auxiliary, self._storage)
        complete = prepare is not None or "+" in found.recipe or chosen.prepare == NotPrepared()
        if not complete:
            chosen = recipe_named(found.recipe, self.config.prepare, auxiliary, self._storage)
        return self._for_engine(chosen if found.ratio is None else replace(chosen, ratio=found.ratio))

    def _for_engine(self, recipe: "Recipe") -> "Recipe":
        """Return the recipe, with the engine's own preparation if another process runs the model."""
        if self.config.model.engine == TRANSFORMERS:
            return recipe
        from kvweave.remote.preparation import prepared_by_vllm

        return prepared_by_vllm(recipe)

    def _named(self, recipe: str | None, prepare: str | None, *, own_budget: bool = False) -> "_Named":
        """Return the recipe that a call or the settings name, with the choice of calibration in place of AUTO.

        A call's own budget goes to that choice, or to UNCALIBRATED if the choice spends none; its own preparation always goes
        to UNCALIBRATED: it was not calibrated.
        """
        name = self.config.recipe if recipe is None else recipe
        if name.rpartition("+")[2] != AUTO:
            return _Named(recipe)
        if name != AUTO or prepare is not None or self.auto is None:
            return _Named(recipe, reason=f"{UNCALIBRATED}, for which nothing was calibrated")
        calibration = self.auto.now()
        result = calibration.result
        if result is None:
            return _Named(recipe, reason=calibration.summary)
        if own_budget and not result.budget:
            stored = parse(result.recipe).storage
            name = displayed(UNCALIBRATED, None, stored)
            return _Named(name, reason=f"{UNCALIBRATED} for this budget, else {calibration.summary}")
        return _Named(result.recipe, None if own_budget else result.ratio, calibration.summary)

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
            complete = prepare is not None or "+" in named or own_preparation(named) is None
            known = full_name(named, prepare if complete else self.config.prepare, self._storage)
        return known or self.recipe(named, prepare).name

    @property
    def _storage(self) -> str | None:
        storage = self.config.store.storage
        return None if storage == "auto" else storage


@dataclass(frozen=True, slots=True)
class _Named:
    """A recipe's name, None for the settings' own; the ratio that goes with it, None for its own; and the reason, shown to users."""

    recipe: str | None
    ratio: float | None = None
    reason: str = ""
