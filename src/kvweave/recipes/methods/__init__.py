"""One file per method; METHODS maps the names users type to what makes the recipe."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import signature

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.plugins import plugins
from kvweave.recipes.methods.ape import ape
from kvweave.recipes.methods.baselines import direct, full, prefix, reuse
from kvweave.recipes.methods.cacheblend import cacheblend
from kvweave.recipes.methods.cacheclip import cacheclip
from kvweave.recipes.methods.cacheclip import refill as cacheclip_refill
from kvweave.recipes.methods.cachecraft import cachecraft
from kvweave.recipes.methods.epic import epic
from kvweave.recipes.methods.fusionrag import fusionrag, over_stale
from kvweave.recipes.methods.kvshare import kvshare
from kvweave.recipes.methods.prophetkv import prophetkv
from kvweave.recipes.methods.qcfuse import qcfuse
from kvweave.recipes.methods.weave import weave
from kvweave.recipes.prepare import (
    Bare,
    Isolated,
    NotPrepared,
    Prepare,
    Previous,
    Similar,
    SimilarAndPrevious,
)
from kvweave.recipes.quantised import Quantised
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.versions import RequestVersions
from kvweave.types import STORAGES, Storage

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
    "cacheclip-refill": cacheclip_refill,
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
"""What makes each recipe, by the name that users type. A recipe that asks a second model takes its name, `auxiliary`."""

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
"""Of a knowledge base: the fewest bits whose cost in quality cannot be told from nothing (lab/docs/store.md)."""


def recipe_named(
    name: str, prepare: str | None = None, auxiliary: str | None = None, storage: str | None = "exact"
) -> Recipe:
    """The recipe a name stands for, with another preparation where one is named: similar+NAME, or as an argument.

    `auxiliary` names the model for those that ask a second one, `storage` how prepared KV is stored; others, and those that
    prepare nothing, have no use for it. None is DEFAULT_STORAGE, without a word of it in the name, but exact for what keeps
    exact versions. A name may end a preparation with a storage, which then counts:
    similar-int8+NAME, or int8+NAME for the recipe's own preparation.
    Raises UnknownRecipe listing the names there are, and InvalidRequest for a preparation of what prepares nothing, and
    for a storage other than exact of a preparation that keeps exact versions.
    """
    if "+" in name:
        if prepare is not None:
            raise InvalidRequest(f"recipe {name!r} names its preparation; leave {prepare!r} out")
        prepare, _, name = name.partition("+")
    if prepare is not None:
        prepare, named = split_storage(prepare)
        storage = named or storage
    if storage is not None and storage not in STORAGES:
        raise InvalidRequest(f"there is no storage {storage!r}; choose one of {', '.join(STORAGES)}")
    if name not in METHODS:
        raise UnknownRecipe(f"there is no recipe {name!r}; choose one of {', '.join(METHODS)}")
    recipe = _made(METHODS[name], auxiliary)
    recipe = _prepared(recipe, prepare)
    if storage is not None:
        return _stored(recipe, STORAGES[storage])
    if recipe.prepare.max_versions is not None:
        return recipe
    return replace(_stored(recipe, DEFAULT_STORAGE), name=recipe.name)


def _made(make: Callable[..., Recipe], auxiliary: str | None) -> Recipe:
    return make(auxiliary) if "auxiliary" in signature(make).parameters else make()


def _prepared(recipe: Recipe, prepare: str | None) -> Recipe:
    """With another preparation, if one is named."""
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
    return replace(recipe, name=f"{prepare}+{recipe.name}", prepare=PREPARATIONS[prepare]())


def _stored(recipe: Recipe, storage: Storage) -> Recipe:
    """With what it prepares stored so, if it prepares anything."""
    if storage == "exact" or recipe.prepare == NotPrepared():
        return recipe
    method, preparation = named_parts(recipe.name)
    name = f"{preparation}-{storage}+{method}" if preparation else f"{storage}+{method}"
    return replace(recipe, name=name, prepare=Quantised(recipe.prepare, storage))


def with_exact_storage(name: str) -> tuple[str, Storage]:
    """Of a recipe's name, what the same recipe is called with exact storage, and the storage that the name says."""
    prepare, _, method = name.rpartition("+")
    preparation, storage = split_storage(prepare) if prepare else (None, None)
    if storage is None or storage == "exact":
        return name, "exact"
    return recipe_named(method, preparation).name, storage


def split_storage(prepare: str) -> tuple[str | None, Storage | None]:
    """Of a preparation's name such as similar-int8, the preparation and the storage; None for what it does not say."""
    preparation, _, last = prepare.rpartition("-")
    return (preparation or None, STORAGES[last]) if last in STORAGES else (prepare, None)


def named_parts(name: str) -> tuple[str, str | None]:
    """Of a recipe's name, the method's and the preparation's; None where there is no name for the preparation."""
    prepare, _, method = name.rpartition("+")
    if prepare or method not in METHODS:
        return method, prepare or None
    own = METHODS[method]().prepare
    return method, next((known for known, make in PREPARATIONS.items() if make() == own), None)
