"""What other packages add to kvweave: commands, recipes and models, through entry points of their distributions.

The groups are `kvweave.commands` (a Typer app or a function by its command's name), `kvweave.recipes` (a function that
returns a Recipe, by the recipe's name) and `kvweave.models` (a folder with weights, by the model's name).
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; none of them is loaded. Read once per process."""
    return {point.name: point for point in entry_points(group=group)}
