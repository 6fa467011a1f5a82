"""Names of recipes as users type them and as they are displayed: [PREPARATION[-STORAGE]+]METHOD or STORAGE+METHOD.

Imports no code that runs models, so that a cached answer is found by its recipe's name before any of it is imported.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.types import STORAGES, Storage

OWN_PREPARATIONS: Final[Mapping[str, str | None]] = {
    "full": None,
    "direct": "bare",
    "reuse": "isolated",
    "prefix": None,
    "ape": "isolated",
    "epic": "bare",
    "cacheblend": "isolated",
    "kvshare": "isolated",
    "cachecraft": "observed",
    "cacheclip": "isolated",
    "fusionrag": "similar",
    "fusionrag-over-stale": "similar",
    "prophetkv": "isolated",
    "qcfuse": "isolated",
    "weave": "woven",
}
"""The name of each method's own preparation; None for a method that prepares nothing. A test compares it with METHODS.
Methods that are not here, such as those of other packages, are asked themselves."""

RENAMED: Final[Mapping[str, str]] = {"cacheclip-refill": "cacheclip"}
"""Earlier names of methods, which `parse` still accepts."""

AUTO: Final = "auto"
"""What stands for the recipe that calibration has chosen for a knowledge base, and elsewhere for UNCALIBRATED."""

UNCALIBRATED: Final = "weave"
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
    """Return what a recipe's name says, and `prepare` and `storage` where the name leaves them open.

    An earlier name of a method gives the present one, and AUTO gives UNCALIBRATED.

    Raises InvalidRequest if `prepare` is given twice, and for a storage that there is not.
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
    name = UNCALIBRATED if name == AUTO else RENAMED.get(name, name)
    return NamedRecipe(name, prepare, None if storage is None else STORAGES[storage])


def displayed(method: str, preparation: str | None, storage: Storage | None) -> str:
    """Return the name that says no more than these."""
    said = "-".join(part for part in (preparation, storage) if part is not None)
    return f"{said}+{method}" if said else method


def full_name(name: str, prepare: str | None = None, storage: str | None = None) -> str | None:
    """Return the name of the recipe that `recipe_named` makes from these; None if only that can tell, or refuses them.

    Raises InvalidRequest as `parse`.
    """
    wanted = parse(name, prepare, storage)
    if wanted.method not in OWN_PREPARATIONS:
        return None
    own = OWN_PREPARATIONS[wanted.method]
    if own is None:
        return wanted.method if wanted.preparation is None else None
    used = own if wanted.preparation is None else wanted.preparation
    coded = None if wanted.storage == "exact" else wanted.storage
    if used not in _PREPARATIONS or (coded and used == _EXACT_PREPARATION):
        return None
    return displayed(wanted.method, None if used == own and not coded else used, coded)


def split_storage(prepare: str) -> tuple[str | None, Storage | None]:
    """Split a preparation's name such as similar-int8 into preparation and storage, either of which may be missing."""
    preparation, _, last = prepare.rpartition("-")
    return (preparation or None, STORAGES[last]) if last in STORAGES else (prepare, None)
