"""`kvweave bench ttft` through the command line, on the shipped model."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import InvalidRequest

FEW = (
    "bench",
    "ttft",
    "--model",
    "reference",
    "--context-tokens",
    "128",
    "--chunk-tokens",
    "64",
    "--rounds",
    "1",
)


@pytest.fixture
def invoke(tmp_path):
    """Return a function that runs the command in this process; its result holds the exception of a failed command."""
    runner = CliRunner(env={"KVWEAVE_HOME": str(tmp_path / "home"), "COLUMNS": "200"})
    return lambda *words: runner.invoke(app, [str(word) for word in words])


def test_json_and_an_output_folder_have_rows_the_environment_and_a_plot(invoke, tmp_path):
    result = invoke(*FEW, "--ratio", "0.25", "--json", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    content = json.loads(result.stdout)
    (row,) = content["rows"]
    assert (row["shape"], row["recipe"], row["ratio"]) == ("reference", "prophetkv", 0.25)
    assert content["full"][0]["gflops_per_s"] > 0
    assert {"command", "commit", "date", "machine", "threads"} <= set(content)
    assert json.loads((tmp_path / "out" / "ttft.json").read_text()) == content
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_requests_are_distinguished_by_where_their_kv_comes_from(invoke):
    result = invoke(*FEW, "--ratio", "0", "--kv-from", "disk", "--kv-from", "memory", "--kv-from", "disk")
    assert result.exit_code == 0, result.exception
    assert [word for word in result.stdout.split() if word in ("memory", "disk")] == ["disk", "memory"] * 3
    assert "stored KV from disk or memory" in result.stdout


def test_without_json_there_is_a_table_and_a_note_on_few_rounds(invoke):
    result = invoke(*FEW, "--ratio", "0", "--quiet")
    assert result.exit_code == 0, result.exception
    assert "efficiency" in result.stdout
    assert "GFLOP/s" in result.stdout
    assert "first look" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "qwen2.5-0.5b"), "give one of them"),
        (("--chunk-tokens", "60"), "not made of chunks of 60"),
        (("--recipe", "reuse", "--ratio", "0.5"), "selects no tokens"),
        (("--kv-from", "tape"), "there is no place of KV 'tape'; choose one of memory, disk"),
    ],
)
def test_impossible_measurements_are_refused(invoke, flags, message):
    refused = invoke(*FEW, *flags)
    assert isinstance(refused.exception, InvalidRequest), refused.exception
    assert message in str(refused.exception)


def test_an_unknown_shape_is_refused_with_the_known_ones(invoke):
    refused = invoke("bench", "ttft", "--shape", "nothing")
    assert "llama-3.2-1b, llama-3.2-3b, qwen2.5-0.5b" in str(refused.exception)
