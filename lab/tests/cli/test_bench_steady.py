"""`kvweave bench steady` through the command line, on the shipped model."""

import json

from typer.testing import CliRunner

from kvweave.cli.app import app

FEW = (
    *("bench", "steady", "--model", "reference", "--queries", "4", "--chunks-per-query", "2"),
    *("--chunk-tokens", "32", "--known-chunks", "4", "--shared-chunks", "2", "--host-limit", "100KB"),
)


def test_an_output_folder_gets_rows_and_a_plot_but_no_kv(tmp_path):
    runner = CliRunner(env={"KVWEAVE_HOME": str(tmp_path / "home"), "COLUMNS": "200"})
    first = runner.invoke(app, [*FEW, "--json", "--output", str(tmp_path / "out")])
    assert first.exit_code == 0, first.exception
    content = json.loads(first.stdout)
    assert len(content["rows"]) == len(content["speedups"]) == 4
    assert content["kept"] == content["quarters"][3] / content["quarters"][1]
    assert {"command", "commit", "date", "machine", "threads"} <= set(content)
    assert json.loads((tmp_path / "out" / "steady.json").read_text()) == content
    assert (tmp_path / "out" / "steady.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "store").exists()
    again = runner.invoke(app, [*FEW, "--quiet", "--output", str(tmp_path / "out")])
    assert again.exit_code == 0, again.exception
    assert "of the second's" in again.stdout
