"""One file per method; METHODS maps the names users type to what makes the recipe."""

from collections.abc import Callable, Mapping

from kvweave.errors import UnknownRecipe
from kvweave.recipes.methods.direct import direct
from kvweave.recipes.methods.full import full
from kvweave.recipes.methods.naive import naive
from kvweave.recipes.methods.prefix import prefix
from kvweave.recipes.methods.reuse import reuse
from kvweave.recipes.recipe import Recipe

METHODS: Mapping[str, Callable[[], Recipe]] = {
    "full": full,
    "naive": naive,
    "direct": direct,
    "reuse": reuse,
    "prefix": prefix,
}


def recipe_named(name: str) -> Recipe:
    """The recipe a name stands for; raises UnknownRecipe listing the names there are."""
    if name not in METHODS:
        raise UnknownRecipe(f"there is no recipe {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]()
