"""An unknown name says how to get what belongs to kvweave-lab where that is missing."""

import pytest
from typer.testing import CliRunner

from kvweave import plugins
from kvweave.cli.app import app
from kvweave.errors import ModelNotFound, UnknownRecipe
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named

HINT = "kvweave-lab has more: run `pip install ./lab`"


@pytest.fixture(params=[False, True], ids=["without", "with"])
def hint(request, monkeypatch):
    """Whether the hint is due: the lab is not installed. Another plugin in its place is enough."""
    plugins.plugins.cache_clear()
    if not request.param:
        monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    yield not request.param
    plugins.plugins.cache_clear()


def test_commands(hint):
    result = CliRunner().invoke(app, ["no-such"])
    assert result.exit_code == 2
    assert "No such command 'no-such'" in result.stderr
    assert (HINT in " ".join(result.stderr.split())) is hint


def test_recipes(hint):
    with pytest.raises(UnknownRecipe, match="there is no recipe 'no-such'; choose one of") as error:
        recipe_named("no-such")
    assert (HINT in str(error.value)) is hint


def test_models(hint, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="cannot load the model 'no-such'") as error:
        load_model("no-such")
    assert (HINT in str(error.value)) is hint
