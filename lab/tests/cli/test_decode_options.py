"""The command line's decoding options, and the bench that measures them."""

import json

from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave_lab.bench import memory_limit

GLORRIC = "What is the password of Glorric?"


def test_an_answer_is_decoded_from_a_file_within_the_bound(command, documents):
    command("add", documents, "--quiet")
    dense = command.json("ask", GLORRIC)
    bounded = command.json("ask", GLORRIC, "--kv-budget", "1", "--resident-bytes", "20MB")
    assert dense["decoding"] is None
    assert bounded["text"] == dense["text"] == "walnut"
    assert 0 < bounded["decoding"]["resident_bytes"] <= 20_000_000
    assert "of KV in memory" in command("ask", GLORRIC, "--kv-budget", "0.5").stdout


def test_impossible_bounds_say_what_is_wrong(command, documents):
    command("add", documents, "--quiet")
    assert "'much' is not a size" in command("ask", GLORRIC, "--resident-bytes", "much", code=1).stderr
    assert "kv_budget is 1.5" in command("ask", GLORRIC, "--kv-budget", "1.5", code=1).stderr
    few = command("ask", GLORRIC, "--resident-bytes", "20kB", "--fresh", code=1)
    assert "resident_bytes" in few.stderr


def test_the_bench_reports_by_the_names_of_all_reports(command):
    bench = ["bench", "decode", "--model", "reference", "--length", "300", "--steps", "2", "--budget", "0.3"]
    told = command.json(*bench, "--resident-bytes", "20MB", "--strategy", "dynakv", "--strategy", "entries")
    assert [row["strategy"] for row in told["rows"]] == ["dense", "dynakv", "entries"]
    for row in told["rows"][1:]:
        assert row["decode_tokens"] == 300
        assert row["budget"] == 0.3
        names = (
            "pages_read_per_token bytes_per_token reads_per_token mean_run_entries hit_rate resident_bytes"
        )
        assert set(names.split()) <= set(row)
        assert row["latency_s_per_token"]["median"] > 0
    assert told["rows"][1]["resident_bound_bytes"] == 20_000_000
    assert told["command"].startswith("kvweave bench decode")
    alone = command.json(*bench, "--resident-bytes", "20MB", "--strategy", "dynakv", "--no-dense")
    assert [row["strategy"] for row in alone["rows"]] == ["dynakv"]
    assert [row["strategy"] for row in command.json(*bench, "--strategy", "dense")["rows"]] == ["dense"]
    unknown = command(*bench, "--strategy", "quest", code=1)
    assert "'quest'" in unknown.stderr


def test_a_bench_under_a_memory_limit_says_so(monkeypatch):
    runner = CliRunner(env={"COLUMNS": "200"})
    words = ["bench", "decode", "--model", "reference", "--length", "64", "--steps", "1", "--budget", "0.5"]
    words += ["--strategy", "window", "--resident-bytes", "20MB", "--quiet"]
    monkeypatch.setattr(memory_limit, "memory_limit_bytes", lambda: 4 * 10**9)
    assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["memory_limit_bytes"] == 4 * 10**9
    assert "under a memory limit of 4.0 GB" in runner.invoke(app, words).stdout
    monkeypatch.setattr(memory_limit, "memory_limit_bytes", lambda: None)
    assert "memory limit" not in runner.invoke(app, words).stdout
