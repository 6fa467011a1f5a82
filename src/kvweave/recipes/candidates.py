"""The budgets that calibration compares with full attention, and what each costs."""

from dataclasses import dataclass, replace
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave.models.engine import Engine
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import extractors_of
from kvweave.recipes.recipe import Recipe

_BUDGETS: Final = (
    ("reuse", 0.0, 0.885),
    ("weave-shifted", 0.1, 0.953),
    ("weave-shifted", 0.2, 0.960),
    ("weave-shifted", 0.35, 0.969),
)
"""Method, ratio, and the share of full attention's answer tokens that it kept on Qwen2.5-Coder 0.5B Instruct
(lab/results/kept_qwen2.5-coder-0.5b_1024.json). The KV that `reuse` takes is prepared for `weave-shifted` too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A budget that may keep what full attention says: a recipe with it as its own ratio.

    Attributes:
        recipe: with the budget as its own ratio.
        ratio: None where the budget is the ratio that the named recipe has anyway.
        prior: the share of full attention's answer tokens that it kept on another model, see `_BUDGETS`.
    """

    recipe: Recipe
    ratio: float | None
    prior: float

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
    """Return the candidates of calibration, with the preparation and storage that the settings name.

    `storage` is auto, exact, int8 or int4. Raises UnknownRecipe for a preparation that there is not.
    """
    found: dict[str, Candidate] = {}
    for method, ratio, prior in _BUDGETS:
        try:
            recipe = recipe_named(method, prepare, auxiliary, None if storage == "auto" else storage)
        except InvalidRequest:  # the preparation keeps exact versions, which have no other storage
            continue
        candidate = Candidate(replace(recipe, ratio=ratio), None if ratio == recipe.ratio else ratio, prior)
        found.setdefault(candidate.key, candidate)
    return tuple(found.values())
