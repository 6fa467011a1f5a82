"""One file per method; METHODS maps the names that users type to functions that make the recipe."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import signature

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.plugins import LAB, lab_missing, plugins
from kvweave.recipes.methods.ape import ape
from kvweave.recipes.methods.baselines import direct, full, prefix, reuse
from kvweave.recipes.methods.cacheblend import cacheblend
from kvweave.recipes.methods.cacheclip import cacheclip
from kvweave.recipes.methods.cachecraft import cachecraft
from kvweave.recipes.methods.epic import epic
from kvweave.recipes.methods.fusionrag import fusionrag, over_stale
from kvweave.recipes.methods.kvshare import kvshare
from kvweave.recipes.methods.prophetkv import prophetkv
from kvweave.recipes.methods.qcfuse import qcfuse
from kvweave.recipes.methods.weave import SimilarAndPrevious, weave
from kvweave.recipes.names import AUTO, displayed, parse, split_storage
from kvweave.recipes.prepare import (
    AnyStorage,
    Bare,
    Isolated,
    NotPrepared,
    Prepare,
    Previous,
    Quantised,
    Similar,
)
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.versions import RequestVersions
from kvweave.types import Storage

_OWN: Mapping[str, Callable[..., Recipe]] = {
    "full": full,
    "direct": direct,
    "reuse": reuse,
    "prefix": prefix,
    "ape": ape,
    "epic": epic,
    "cacheblend": cacheblend,
    "kvshare": kvshare,
    "cachecraft": cachecraft,
    "cacheclip": cacheclip,
    "fusionrag": fusionrag,
    "fusionrag-over-stale": over_stale,
    "prophetkv": prophetkv,
    "qcfuse": qcfuse,
    "weave": weave,
}


class _Methods(Mapping[str, Callable[..., Recipe]]):
    """The recipes of this package, and those that others add through the entry-point group `kvweave.recipes`."""

    def __getitem__(self, name: str) -> Callable[..., Recipe]:
        own = _OWN.get(name)
        return own if own is not None else plugins("kvweave.recipes")[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter([*_OWN, *sorted(plugins("kvweave.recipes"))])

    def __len__(self) -> int:
        return len(_OWN) + len(plugins("kvweave.recipes"))


METHODS: Mapping[str, Callable[..., Recipe]] = _Methods()
"""Functions that make a recipe, by its name. A recipe with a second model takes that model's name as `auxiliary`."""

PREPARATIONS: Mapping[str, Callable[[], Prepare]] = {
    "bare": Bare,
    "isolated": Isolated,
    "similar": Similar,
    "following": Previous,
    "woven": SimilarAndPrevious,
    "observed": RequestVersions,
}
"""Offline preparations that combine with any selective recipe."""

DEFAULT_STORAGE: Storage = "int8"
"""The storage of a knowledge base: the fewest bits without a measurable loss of quality (lab/docs/store.md)."""


def recipe_named(
    name: str, prepare: str | None = None, auxiliary: str | None = None, storage: str | None = "exact"
) -> Recipe:
    """Return the recipe of this name, with another preparation or storage if one is named.

    Args:
        name: a name in METHODS, alone or in the form in which recipes are displayed: similar-int8+NAME names preparation and
            storage, similar+NAME the preparation, int8+NAME the storage of the recipe's own preparation.
        prepare: a name in PREPARATIONS, alone or with a storage, such as similar-int8; None is the recipe's own.
        auxiliary: the model for recipes that use a second one; others ignore it.
        storage: how prepared KV is stored; recipes that prepare nothing ignore it. A storage in `name` or `prepare` takes
            precedence. None is DEFAULT_STORAGE without its name in the recipe's, and exact for recipes that keep exact versions.

    Raises UnknownRecipe listing the names there are, and InvalidRequest for a preparation of a recipe that prepares
    nothing, or for a storage other than exact of one that keeps exact versions.
    """
    name, preparation, stored = parse(name, prepare, storage)
    if name not in METHODS:
        if name in LAB["kvweave.recipes"]:
            raise lab_missing(f"recipe {name!r}")
        raise UnknownRecipe(f"there is no recipe {name!r}; choose one of {', '.join((AUTO, *METHODS))}")
    recipe = METHODS[name](auxiliary) if uses_auxiliary(name) else METHODS[name]()
    recipe = _with_preparation(recipe, preparation)
    if stored is not None:
        return _with_storage(recipe, stored)
    if recipe.prepare.max_versions is not None:
        return recipe
    return replace(_with_storage(recipe, DEFAULT_STORAGE), name=recipe.name)


def as_recipe(recipe: str | Recipe, prepare: str | None = None, storage: str = "exact") -> Recipe:
    """Return the recipe itself, or the one of this name; see `recipe_named`.

    Raises InvalidRequest for a preparation or storage beside a Recipe, which has its own.
    """
    if isinstance(recipe, str):
        return recipe_named(recipe, prepare, storage=storage)
    if prepare is not None or storage != "exact":
        raise InvalidRequest(
            f"recipe {recipe.name!r} is a Recipe, which has its own preparation; leave prepare and storage out"
        )
    return recipe


def in_any_storage(recipe: Recipe) -> Recipe:
    """Return the recipe over prepared KV in whatever storage it is there; one that names a storage is unchanged."""
    own = recipe.prepare
    if own.storage != "exact" or own == NotPrepared() or own.max_versions is not None:
        return recipe
    return replace(recipe, prepare=AnyStorage(own))


def uses_auxiliary(method: str) -> bool:
    """Return whether the recipe of this name in METHODS uses a second model."""
    return "auxiliary" in signature(METHODS[method]).parameters


def exact_name(name: str) -> tuple[str, Storage]:
    """Return the name of the same recipe with exact storage, and the storage that the given name says."""
    prepare, _, method = name.rpartition("+")
    preparation, storage = split_storage(prepare) if prepare else (None, None)
    if storage is None or storage == "exact":
        return name, "exact"
    return recipe_named(method, preparation).name, storage


def name_parts(name: str) -> tuple[str, str | None]:
    """Split a recipe's name into the method and the preparation; None for a preparation without a name."""
    prepare, _, method = name.rpartition("+")
    if prepare or method not in METHODS:
        return method, prepare or None
    own = METHODS[method]().prepare
    return method, next((known for known, make in PREPARATIONS.items() if make() == own), None)


def _with_preparation(recipe: Recipe, prepare: str | None) -> Recipe:
    if prepare is None:
        return recipe
    if prepare not in PREPARATIONS:
        raise UnknownRecipe(f"there is no preparation {prepare!r}; choose one of {', '.join(PREPARATIONS)}")
    if recipe.prepare == NotPrepared():
        raise InvalidRequest(
            f"recipe {recipe.name!r} prepares nothing, also not as {prepare!r}; leave it or the preparation out"
        )
    if recipe.prepare == PREPARATIONS[prepare]():
        return recipe
    return replace(recipe, name=displayed(recipe.name, prepare, None), prepare=PREPARATIONS[prepare]())


def _with_storage(recipe: Recipe, storage: Storage) -> Recipe:
    if storage == "exact" or recipe.prepare == NotPrepared():
        return recipe
    method, preparation = name_parts(recipe.name)
    return replace(
        recipe, name=displayed(method, preparation, storage), prepare=Quantised(recipe.prepare, storage)
    )
