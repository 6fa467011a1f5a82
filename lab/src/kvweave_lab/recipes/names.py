"""What the names of measured recipes say, for tables that put methods, preparations and storages side by side."""

from kvweave.recipes.methods import METHODS, preparation_name, recipe_named
from kvweave.recipes.names import split_storage
from kvweave.types import Storage


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
    return method, preparation_name(METHODS[method]().prepare)
