"""Names of recipes as users type them and as they are displayed: [PREPARATION[-STORAGE]+]METHOD or STORAGE+METHOD.

Imports no code that runs models, so that a cached answer is found by its recipe's name before any of it is imported.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.types import STORAGES, Storage


class Method(NamedTuple):
    """Where the function is that makes a method's recipe, in `methods/`, and the name of its own preparation, if it has one."""

    function: str
    preparation: str | None


OWN_METHODS: Final[Mapping[str, Method]] = {
    "full": Method("baselines:full", None),
    "reuse": Method("baselines:reuse", "isolated"),
    "prefix": Method("baselines:prefix", None),
    "ape": Method("ape:ape", "isolated"),
    "epic": Method("epic:epic", "bare"),
    "cacheblend": Method("cacheblend:cacheblend", "isolated"),
    "kvshare": Method("kvshare:kvshare", "isolated"),
    "cachecraft": Method("cachecraft:cachecraft", "observed"),
    "cacheclip": Method("cacheclip:cacheclip", "isolated"),
    "fusionrag": Method("fusionrag:fusionrag", "similar"),
    "prophetkv": Method("prophetkv:prophetkv", "isolated"),
    "qcfuse": Method("qcfuse:qcfuse", "isolated"),
    "weave": Method("weave:weave", "woven"),
    "weave-shifted": Method("weave:shifted", "woven"),
}
"""The methods of this package. `kvweave.recipes.methods.METHODS` also has those of other packages."""

AUTO: Final = "auto"
"""What stands for the recipe that calibration has chosen for a knowledge base, and elsewhere for UNCALIBRATED."""

UNCALIBRATED: Final = "weave-shifted"
EXACT: Final = "prefix"
"""The recipe of calibration where no budget keeps what full attention says: its answers are full attention's."""

_EXACT_PREPARATION: Final = "observed"
_PREPARATIONS: Final = frozenset(("bare", "isolated", "similar", "following", "woven", _EXACT_PREPARATION))


class NamedRecipe(NamedTuple):
    """What a name says: the method, a preparation and a storage, None where it says nothing."""

    method: str
    preparation: str | None
    storage: Storage | None


def parse(name: str, prepare: str | None = None, storage: str | None = None) -> NamedRecipe:
    """Return the parts of a recipe's name; `prepare` and `storage` fill the parts that the name leaves open.

    AUTO gives UNCALIBRATED. Raises InvalidRequest if `prepare` is given twice, and for an unknown storage.
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
    return NamedRecipe(
        UNCALIBRATED if name == AUTO else name, prepare, None if storage is None else STORAGES[storage]
    )


def split_storage(prepare: str) -> tuple[str | None, Storage | None]:
    """Split a preparation's name such as similar-int8 into preparation and storage, either of which may be missing."""
    preparation, _, last = prepare.rpartition("-")
    return (preparation or None, STORAGES[last]) if last in STORAGES else (prepare, None)


def displayed(method: str, preparation: str | None, storage: Storage | None) -> str:
    """Return the name that says no more than these."""
    said = "-".join(part for part in (preparation, storage) if part is not None)
    return f"{said}+{method}" if said else method


def recipe_name(named: NamedRecipe, own: str | None) -> str:
    """Return the one name of what `named` says of a method whose own preparation is `own`."""
    used = own if named.preparation is None else named.preparation
    coded = None if named.storage == "exact" else named.storage
    return displayed(named.method, None if used == own and coded is None else used, coded)


def full_name(name: str, prepare: str | None = None, storage: str | None = None) -> str | None:
    """Return the name of the recipe that `recipe_named` makes from these; None if only that can tell, or refuses them.

    Raises InvalidRequest as `parse`.
    """
    named = parse(name, prepare, storage)
    if named.method not in OWN_METHODS:
        return None
    own = OWN_METHODS[named.method].preparation
    if own is None:
        return named.method if named.preparation is None else None
    used = own if named.preparation is None else named.preparation
    if used not in _PREPARATIONS or (used == _EXACT_PREPARATION and named.storage in ("int8", "int4")):
        return None
    return recipe_name(named, own)


def own_preparation(method: str) -> str | None:
    """Return the name of the preparation of one of OWN_METHODS; None for another, and for one that prepares nothing."""
    return OWN_METHODS[method].preparation if method in OWN_METHODS else None
