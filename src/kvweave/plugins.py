"""Commands, recipes and models that other packages add to kvweave, by entry points of their distributions.

The groups are `kvweave.commands` (a Typer app or a function, by the command's name), `kvweave.recipes` (a function that
returns a Recipe, by the recipe's name) and `kvweave.models` (a folder with weights that the package ships, or a function that
returns the folder of a model that it does not ship, by the model's name).
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, without loading them. Read once per process."""
    return {point.name: point for point in entry_points(group=group)}


def more_in_lab(group: str) -> str:
    """The end of an error about an unknown name: how to get those of kvweave-lab; empty where a plugin adds to the group."""
    if plugins(group):
        return ""
    return "; kvweave-lab has more: run `pip install ./lab` in a clone of the repository"
