"""Options that commands share: one declaration, expanded into a command's parameters and collected in one object."""

import dataclasses
import typing
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvweave.cli import options as opt
from kvweave.config import Config, all_settings

SIZES = {"resident_bytes"}
"""Settings in bytes that the command line takes as text: 200MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Options of one command."""

    size: Annotated[int, typer.Option("--size", min=1)]
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@pytest.fixture
def invoke():
    """Return a function that runs a command with the given words; it returns the options, or the output and exit code."""
    app, got = typer.Typer(), []

    @app.command()
    @opt.with_options("home", "top_k", "prediction_stride", "tier", top_k="Chunks of a test.")
    def run(first: Annotated[str, typer.Argument()], *, shared: opt.SharedOptions, cut: Cut) -> None:
        got.append((first, shared, cut))

    def run_words(*words, **environment):
        result = CliRunner(env={"COLUMNS": "200", **environment}).invoke(app, words)
        return got.pop() if got else (result.output, result.exit_code)

    return run_words


def test_a_command_gets_its_options_as_objects(invoke):
    first, shared, cut = invoke(
        "a", "--top-k", "3", "--size", "2", "--name", "x", "--name", "y", "--stride", "4"
    )
    assert first == "a"
    assert shared == opt.SharedOptions(home=shared.home, top_k=3, prediction_stride=4)
    assert cut == Cut(2, ["x", "y"])


def test_environment_variables_have_the_names_of_the_settings(invoke):
    variables = {
        "KVWEAVE_HOME": "/h",
        "KVWEAVE_TOP_K": "3",
        "KVWEAVE_PREDICTION_STRIDE": "2",
        "KVWEAVE_TIER": "disk",
    }
    _, shared, _ = invoke("a", "--size", "2", "--top-k", "4", **variables)
    assert shared == opt.SharedOptions(home=Path("/h"), top_k=4, prediction_stride=2)


def test_help_lists_the_named_options_in_order_with_their_texts(invoke):
    output, code = invoke("--help")
    assert code == 0
    assert "Chunks of a test." in output
    assert "Number of questions predicted per round" in output
    assert "--kb" not in output
    places = [output.index(name) for name in ("--home", "--top-k", "--stride", "--tier", "--size", "--name")]
    assert places == sorted(places)


def test_a_required_option_of_a_dataclass_is_required(invoke):
    _, code = invoke("a")
    assert code == 2


def test_options_have_the_types_of_the_settings():
    components = [type(getattr(Config(home=Path()), field.name)) for field in dataclasses.fields(Config)]
    configs = [Config, *(each for each in components if dataclasses.is_dataclass(each))]
    types = {name: hint for each in configs for name, hint in typing.get_type_hints(each).items()}
    shared = typing.get_type_hints(opt.SharedOptions)
    for name in (shared.keys() & all_settings().keys()) - SIZES:
        assert shared[name] == types[name] | None, name
