"""Commands, recipes and models that other packages add to kvweave, by entry points of their distributions.

The groups are `kvweave.commands` (a Typer app or a function, by the command's name), `kvweave.recipes` (a function that
returns a Recipe, by the recipe's name) and `kvweave.models` (a folder with weights, by the model's name).
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvweave.errors import MissingExtra


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, without loading them. Read once per process."""
    return {point.name: point for point in entry_points(group=group)}


LAB: Final[Mapping[str, Mapping[str, str]]] = {
    "kvweave.commands": {
        "bench": "Measure speed on this machine.",
        "eval": "Compare the recipes' answers with full attention's.",
        "profile-layers": "Find the layers that qcfuse scores tokens with.",
        "train-selector": "Fine-tune the model that cacheclip selects with.",
    },
    "kvweave.recipes": dict.fromkeys(
        (
            "naive",
            "direct",
            "random",
            "idealised",
            "cacheblend-kv",
            "cacheblend-gradual",
            "cacheclip-windows",
            "fusionrag-alone",
            "fusionrag-over-stale",
        ),
        "",
    ),
    "kvweave.models": {"longer": ""},
}
"""What kvweave-lab adds, by entry-point group, with its line in `kvweave --help`.

Named here so that a missing one can say what to install, and so that `--help` need not import the lab.
"""


def lab_missing(what: str) -> MissingExtra:
    """Return the error for a part of kvweave-lab that is not installed."""
    return MissingExtra(
        f"{what} belongs to kvweave-lab, which is not installed; run `pip install ./lab` in a clone of the repository"
    )
