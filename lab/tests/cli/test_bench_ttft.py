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
    """The command inside this process, which saves loading PyTorch again; errors come back as the exception."""
    runner = CliRunner(env={"KVWEAVE_HOME": str(tmp_path / "home"), "COLUMNS": "200"})
    return lambda *words: runner.invoke(app, [str(word) for word in words])


def test_json_and_a_folder_have_rows_circumstances_and_a_plot(invoke, tmp_path):
    told = invoke(*FEW, "--ratio", "0.25", "--json", "--output", tmp_path / "out")
    assert told.exit_code == 0, told.exception
    content = json.loads(told.stdout)
    (row,) = content["rows"]
    assert (row["shape"], row["recipe"], row["ratio"]) == ("reference", "prophetkv", 0.25)
    assert content["full"][0]["gflops_per_s"] > 0
    assert {"command", "commit", "date", "machine", "threads"} <= set(content)
    assert json.loads((tmp_path / "out" / "ttft.json").read_text()) == content
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_requests_are_told_apart_by_where_their_kv_came_from(invoke):
    told = invoke(*FEW, "--ratio", "0", "--kv-from", "disk", "--kv-from", "memory", "--kv-from", "disk")
    assert told.exit_code == 0, told.exception
    assert [word for word in told.stdout.split() if word in ("memory", "disk")] == ["disk", "memory"] * 3
    assert "stored KV from disk or memory" in told.stdout


def test_without_json_there_is_a_table_and_a_word_on_few_rounds(invoke):
    told = invoke(*FEW, "--ratio", "0", "--quiet")
    assert told.exit_code == 0, told.exception
    assert "efficiency" in told.stdout
    assert "GFLOP/s" in told.stdout
    assert "first look" in told.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--shape", "qwen2.5-0.5b"), "give one of them"),
        (("--chunk-tokens", "60"), "not made of chunks of 60"),
        (("--recipe", "reuse", "--ratio", "0.5"), "selects no tokens"),
        (("--kv-from", "tape"), "there is no place of KV 'tape'; choose one of memory, disk"),
    ],
)
def test_what_cannot_be_measured_is_said(invoke, flags, said):
    refused = invoke(*FEW, *flags)
    assert isinstance(refused.exception, InvalidRequest), refused.exception
    assert said in str(refused.exception)


def test_an_unknown_shape_lists_those_there_are(invoke):
    refused = invoke("bench", "ttft", "--shape", "nothing")
    assert "llama-3.2-1b, llama-3.2-3b, qwen2.5-0.5b" in str(refused.exception)
