"""What belongs to kvweave-lab says what to install where it is missing."""

import pytest
from typer.testing import CliRunner

from kvweave import plugins
from kvweave.cli.app import app
from kvweave.errors import MissingExtra
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named


@pytest.fixture(autouse=True)
def no_lab(monkeypatch):
    plugins.plugins.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    yield
    plugins.plugins.cache_clear()


@pytest.mark.parametrize("name", plugins.LAB["kvweave.commands"])
def test_commands(name):
    error = CliRunner().invoke(app, [name, "--help"]).exception
    assert isinstance(error, MissingExtra)
    assert f"`kvweave {name}`" in str(error)
    assert "pip install ./lab" in str(error)


@pytest.mark.parametrize("name", plugins.LAB["kvweave.recipes"])
def test_recipes(name):
    with pytest.raises(MissingExtra, match=rf"recipe '{name}' belongs to kvweave-lab"):
        recipe_named(name)


@pytest.mark.parametrize("name", plugins.LAB["kvweave.models"])
def test_models(name):
    with pytest.raises(MissingExtra, match=rf"model '{name}' belongs to kvweave-lab"):
        load_model(name)


def test_the_names_are_those_of_the_lab(monkeypatch):
    monkeypatch.undo()
    plugins.plugins.cache_clear()
    assert {group: set(plugins.plugins(group)) for group in plugins.LAB} == {
        group: set(names) for group, names in plugins.LAB.items()
    }
