"""The name of a recipe, told without making it, is the name of the recipe that is made."""

import itertools

import pytest

from kvweave.answering.settings import Settings
from kvweave.config import Config, StoreConfig
from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.recipes.methods import METHODS, PREPARATIONS, preparation_name, recipe_named
from kvweave.recipes.names import OWN_METHODS, full_name, own_preparation
from kvweave.recipes.prepare import NotPrepared
from kvweave.types import STORAGES

PREPARES = [None, *PREPARATIONS, *STORAGES, *(f"{name}-int8" for name in PREPARATIONS), "", "unknown"]


def made(name, prepare, storage):
    """The name of the recipe that is made; None if it is refused."""
    try:
        return recipe_named(name, prepare, storage=storage).name
    except InvalidRequest:
        return None


@pytest.mark.parametrize("method", OWN_METHODS)
def test_it_is_the_name_of_the_recipe_that_is_made(method):
    for prepare, storage in itertools.product(PREPARES, [None, *STORAGES]):
        assert full_name(method, prepare, storage) == made(method, prepare, storage)
        if prepare is not None:
            assert full_name(f"{prepare}+{method}", None, storage) == made(
                f"{prepare}+{method}", None, storage
            )


def test_the_own_preparation_is_that_of_the_recipe():
    for name in OWN_METHODS:
        prepare = METHODS[name]().prepare
        assert own_preparation(name) == preparation_name(prepare)
        assert (own_preparation(name) is None) == (prepare == NotPrepared())


def test_others_are_asked_themselves():
    assert full_name("naive") is None
    assert full_name("no-such-recipe") is None
    with pytest.raises(InvalidRequest, match="names its preparation"):
        full_name("similar+weave", "bare")
    with pytest.raises(InvalidRequest, match="no storage 'int9'"):
        full_name("weave", storage="int9")


@pytest.mark.parametrize("storage", ["auto", "int8"])
@pytest.mark.parametrize("usual", [None, "similar", "woven-int4"])
@pytest.mark.parametrize("own", ["weave", "bare+epic", "full"])
def test_an_answer_is_kept_under_the_name_of_the_recipe_that_makes_it(tmp_path, storage, usual, own):
    config = Config(home=tmp_path, recipe=own, prepare=usual, store=StoreConfig(storage=storage))
    settings = Settings(config, tmp_path)
    for named, prepare in itertools.product(
        [None, "reuse", "prefix", "following+epic", "naive"], [None, "bare"]
    ):
        try:
            recipe = settings.recipe(named, prepare)
        except (InvalidRequest, UnknownRecipe):
            with pytest.raises(InvalidRequest):
                settings.options(recipe=named, prepare=prepare)
        else:
            options = settings.options(recipe=named, prepare=prepare)
            assert options.recipe == recipe.name
            assert settings.recipe_of(options) == recipe
