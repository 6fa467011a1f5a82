"""What the names of measured recipes say."""

import pytest

from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave_lab.recipes.names import exact_name, name_parts


@pytest.mark.parametrize("name", METHODS)
def test_the_exact_name_leaves_the_storage_out(name):
    plain = recipe_named(name)
    assert exact_name(name) == (name, "exact")
    if plain.prepare != NotPrepared() and plain.prepare.max_versions is None:
        assert exact_name(recipe_named(name, storage="int8").name) == (name, "int8")


def test_the_exact_name_keeps_the_preparation():
    assert exact_name("similar-int4+prophetkv") == ("similar+prophetkv", "int4")


def test_the_parts_are_method_and_preparation():
    assert name_parts("similar-int8+prophetkv") == ("prophetkv", "similar-int8")
    for name in METHODS:
        method, preparation = name_parts(name)
        assert method == name
        prepare = recipe_named(name).prepare
        assert preparation is None or PREPARATIONS[preparation]() == prepare
        assert preparation is None or prepare != NotPrepared()
