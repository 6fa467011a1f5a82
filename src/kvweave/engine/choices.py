"""What a question is answered with: what was named with it, and the settings where that left something open.

Knows neither documents nor models.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kvweave.answers.records import Circumstances
from kvweave.config import DEFAULT_NEW_TOKENS, Config, GenerationConfig, within_context
from kvweave.decode.settings import ClusteredKV, asked_for
from kvweave.engine.options import Options
from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Choices:
    """Chooses by the settings of the knowledge base in `folder`."""

    config: Config
    folder: Path

    def recipe(self, named: str | None = None, prepare: str | None = None) -> Recipe:
        """What is named here, else in the settings; there a preparation is for those recipes that prepare something.

        Raises UnknownRecipe and InvalidRequest.
        """
        auxiliary = self.config.model.auxiliary
        storage = None if self.config.store.storage == "auto" else self.config.store.storage
        if named is None:
            return recipe_named(self.config.recipe, prepare or self.config.prepare, auxiliary, storage)
        chosen = recipe_named(named, prepare, auxiliary, storage)
        complete = prepare is not None or "+" in named or chosen.prepare == NotPrepared()
        return chosen if complete else recipe_named(named, self.config.prepare, auxiliary, storage)

    def circumstances(self, recipe: Recipe, options: Options, top_k: int) -> Circumstances | None:
        """Under which settings an answer is kept and given again; None where it is not: it was drawn at random."""
        generation = self.config.generation
        if options.bank == "ignore" or generation.temperature > 0:
            return None
        return Circumstances(
            recipe.name,
            options.ratio,
            options.coverage,
            top_k,
            generation.max_new_tokens,
            options.drop_chunks,
            self.config.model.auxiliary,
            self.config.decoding.kv_budget,
        )

    def top_k(self, named: int | None = None) -> int:
        """How many chunks are looked for; raises InvalidRequest below one."""
        top_k = self.config.retrieval.top_k if named is None else named
        if top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least one chunk is needed")
        return top_k

    @property
    def generation(self) -> GenerationConfig:
        """How answers are decoded."""
        return self.config.generation

    def max_new_tokens(self, context_tokens: int) -> int:
        """The most tokens of an answer by a model that holds this many."""
        return within_context(self.config.generation.max_new_tokens, DEFAULT_NEW_TOKENS, context_tokens)

    @property
    def kv(self) -> ClusteredKV | None:
        """How the KV is held while an answer is decoded; None: all of it in memory."""
        return self.decoded_from(self.config.decoding.kv_budget)

    def decoded_from(self, kv_budget: float | None) -> ClusteredKV | None:
        """The same with this budget."""
        wanted = replace(self.config.decoding, kv_budget=kv_budget)
        # Beside the knowledge base: the system's temporary folder may well be memory.
        return asked_for(wanted, self.folder / "decoding")
