"""One file per method; METHODS maps the names that users type to functions that make the recipe."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.plugins import more_in_lab, plugins
from kvweave.recipes.methods.cachecraft import RequestVersions
from kvweave.recipes.methods.weave import SimilarAndPrevious
from kvweave.recipes.names import AUTO, OWN_METHODS, parse, recipe_name
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
from kvweave.types import Storage


class _Methods(Mapping[str, Callable[..., Recipe]]):
    """The recipes of this package, and those that others add through the entry-point group `kvweave.recipes`."""

    def __getitem__(self, name: str) -> Callable[..., Recipe]:
        make: Callable[..., Recipe]
        if name in OWN_METHODS:
            module, _, function = OWN_METHODS[name].function.partition(":")
            make = getattr(import_module(f"{__name__}.{module}"), function)
        else:
            make = plugins("kvweave.recipes")[name].load()
        return make

    def __iter__(self) -> Iterator[str]:
        return iter([*OWN_METHODS, *sorted(plugins("kvweave.recipes"))])

    def __len__(self) -> int:
        return len(OWN_METHODS) + len(plugins("kvweave.recipes"))


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
    named = parse(name, prepare, storage)
    if named.method not in METHODS:
        more, known = more_in_lab("kvweave.recipes"), ", ".join((AUTO, *METHODS))
        raise UnknownRecipe(f"there is no recipe {named.method!r}; choose one of {known}{more}")
    make = METHODS[named.method]
    recipe = make(auxiliary) if uses_auxiliary(named.method) else make()
    used = recipe.prepare if named.preparation is None else _preparation_for(recipe, named.preparation)
    if recipe.prepare == NotPrepared():
        return recipe
    stored = named.storage or ("exact" if used.max_versions is not None else DEFAULT_STORAGE)
    return replace(
        recipe,
        name=recipe_name(named._replace(method=recipe.name), preparation_name(recipe.prepare)),
        prepare=used if stored == "exact" else Quantised(used, stored),
    )


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


def preparation_name(prepare: Prepare) -> str | None:
    """Return the name of a preparation in PREPARATIONS, None if it has none."""
    return next((name for name, make in PREPARATIONS.items() if make() == prepare), None)


def _preparation_for(recipe: Recipe, name: str) -> Prepare:
    if name not in PREPARATIONS:
        raise UnknownRecipe(f"there is no preparation {name!r}; choose one of {', '.join(PREPARATIONS)}")
    if recipe.prepare == NotPrepared():
        raise InvalidRequest(
            f"recipe {recipe.name!r} prepares nothing, also not as {name!r}; leave it or the preparation out"
        )
    return PREPARATIONS[name]()
