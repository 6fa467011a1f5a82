"""The budgets that calibration compares with full attention, and what each costs."""

from dataclasses import dataclass, replace
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave.models.engine import Engine
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import DEFAULT_STORAGE, recipe_named
from kvweave.recipes.offline import extractors_of
from kvweave.recipes.recipe import Recipe

_BUDGETS: Final = (
    ("reuse", None, "int4", 0.0),
    ("reuse", None, "int8", 0.0),
    ("reuse", "woven", "int4", 0.0),
    ("reuse", "following", "int8", 0.0),
    ("reuse", "woven", "int8", 0.0),
    ("weave", None, "int8", 0.05),
    ("prophetkv", None, "int8", 0.1),
    ("weave", None, "int4", 0.1),
    ("weave", None, "int8", 0.1),
    ("weave", "following", "int8", 0.1),
    ("cacheblend", "woven", "int8", 0.1),
    ("weave", None, "int8", 0.3),
    ("weave", None, "int8", 0.5),
)
"""Method, preparation where it is not the method's own, storage and ratio."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A budget that may keep what full attention says: a recipe with it as its own ratio.

    `ratio` is None where the budget is the ratio that the named recipe has anyway.
    """

    recipe: Recipe
    ratio: float | None

    @property
    def key(self) -> str:
        """Names it: recipe and budget."""
        return f"{self.recipe.name} {self.recipe.ratio:g}"

    @property
    def offline_passes(self) -> int:
        """Passes of the model over a chunk when it is prepared, at most: one per KV entry and one per other feature."""
        own = self.recipe.prepare
        return own.entry_count + len(self._extractors)

    def stored_bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Return about how many bytes of the store a prepared chunk of this length takes."""
        features = sum(each.bytes(adapter, chunk_tokens) for each in self._extractors)
        return self.recipe.prepare.bytes(adapter, chunk_tokens) + features

    @property
    def _extractors(self) -> list[FeatureExtractor]:
        """Those that need a pass of their own."""
        return [each for each in extractors_of(self.recipe) if each not in self.recipe.prepare.by_products]


def candidates(prepare: str | None, storage: str, auxiliary: str | None) -> tuple[Candidate, ...]:
    """Return the candidates of calibration: all, or those with the preparation and storage that the settings name.

    `storage` is auto, exact, int8 or int4. Raises UnknownRecipe for a preparation that there is not.
    """
    found: dict[str, Candidate] = {}
    for method, own, stored, ratio in _BUDGETS:
        default = None if stored == DEFAULT_STORAGE else stored  # a default is not part of a recipe's name
        try:
            recipe = recipe_named(
                method, prepare or own, auxiliary, default if storage == "auto" else storage
            )
        except InvalidRequest:  # its preparation keeps exact versions, which have no other storage
            continue
        candidate = Candidate(replace(recipe, ratio=ratio), None if ratio == recipe.ratio else ratio)
        found.setdefault(candidate.key, candidate)
    return tuple(found.values())
