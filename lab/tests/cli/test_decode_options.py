"""The command line's decoding options, and the bench that measures them."""

import json

from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave_lab.bench import measurement as environment

RECIPE = "reuse"  # prepares least; nothing here depends on it

GLORRIC = "What is the password of Glorric?"


def test_ask_decodes_with_kv_on_disk_within_the_memory_limit(command, documents):
    command("add", documents, "--quiet")
    dense = command.json("ask", GLORRIC)
    bounded = command.json("ask", GLORRIC, "--kv-budget", "1", "--resident-bytes", "20MB")
    assert dense["decoding"] is None
    assert bounded["text"] == dense["text"] == "walnut"
    assert 0 < bounded["decoding"]["resident_bytes"] <= 20_000_000
    forced = command("ask", GLORRIC, "--kv-budget", "0.5")
    assert "of KV in memory" in forced.stdout
    assert "is slower than without one on a text of" in forced.stderr


def test_invalid_limits_are_explained(command, documents):
    command("add", documents, "--quiet")
    assert "'much' is not a size" in command("ask", GLORRIC, "--resident-bytes", "much", code=1).stderr
    assert "kv_budget is 1.5" in command("ask", GLORRIC, "--kv-budget", "1.5", code=1).stderr
    too_small = command("ask", GLORRIC, "--resident-bytes", "20kB", "--fresh", code=1)
    assert "resident_bytes" in too_small.stderr


def test_bench_decode_reports_the_fields_of_all_decoding_reports(command):
    bench = ["bench", "decode", "--model", "reference", "--length", "300", "--steps", "2", "--budget", "0.3"]
    report = command.json(*bench, "--resident-bytes", "20MB", "--strategy", "dynakv", "--strategy", "entries")
    assert [row["strategy"] for row in report["rows"]] == ["dense", "dynakv", "entries"]
    for row in report["rows"][1:]:
        assert row["decode_tokens"] == 300
        assert row["budget"] == 0.3
        names = (
            "pages_read_per_token bytes_per_token reads_per_token mean_run_entries hit_rate resident_bytes"
        )
        assert set(names.split()) <= set(row)
        assert row["latency_s_per_token"]["median"] > 0
    assert report["rows"][1]["resident_bound_bytes"] == 20_000_000
    assert report["command"].startswith("kvweave bench decode")
    without_dense = command.json(*bench, "--resident-bytes", "20MB", "--strategy", "dynakv", "--no-dense")
    assert [row["strategy"] for row in without_dense["rows"]] == ["dynakv"]
    assert [row["strategy"] for row in command.json(*bench, "--strategy", "dense")["rows"]] == ["dense"]
    unknown = command(*bench, "--strategy", "nearest", code=1)
    assert "'nearest'" in unknown.stderr


def test_bench_decode_reports_a_memory_limit(monkeypatch):
    runner = CliRunner(env={"COLUMNS": "200"})
    words = ["bench", "decode", "--model", "reference", "--length", "64", "--steps", "1", "--budget", "0.5"]
    words += ["--strategy", "window", "--resident-bytes", "20MB", "--quiet"]
    monkeypatch.setattr(environment, "memory_limit_bytes", lambda: 4 * 10**9)
    assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["memory_limit_bytes"] == 4 * 10**9
    assert "under a memory limit of 4.0 GB" in runner.invoke(app, words).stdout
    monkeypatch.setattr(environment, "memory_limit_bytes", lambda: None)
    assert "memory limit" not in runner.invoke(app, words).stdout
