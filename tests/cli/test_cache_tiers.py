"""cache stats, limit, verify and clear, tier by tier."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"


@pytest.fixture
def invoke(tmp_path):
    """The command inside this process, with a folder as the shared tier."""
    runner = CliRunner(
        env={
            "KVWEAVE_HOME": str(tmp_path / "home"),
            "KVWEAVE_CHUNK_TOKENS": "48",
            "KVWEAVE_RECIPE": "reuse",
            "KVWEAVE_SHARED": f"file://{tmp_path}/shared",
            "COLUMNS": "200",
        }
    )
    return lambda *words: runner.invoke(app, [str(word) for word in words])


def facts(result):
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_shared_entries_are_shown_verified_and_cleared(invoke, documents, tmp_path):
    invoke("add", documents)
    stats = facts(invoke("cache", "stats", "--json"))
    disk, shared = stats["by_tier"]["disk"], stats["by_tier"]["shared"]
    assert shared["entries"] == disk["entries"] == stats["entries"] > 0
    assert shared["bytes"] == disk["bytes"] == sum(kind["bytes"] for kind in stats["by_kind"].values())
    assert shared["waiting"] == 0
    shown = invoke("cache", "stats").output
    assert f"file://{tmp_path}/shared" in "".join(shown.split())  # a narrow terminal folds it
    assert "heat" in shown
    report = facts(invoke("cache", "verify", "--tier", "shared", "--json"))
    assert (report["checked"], report["shared_checked"]) == (0, shared["entries"])
    damaged = next((tmp_path / "shared" / "default").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert invoke("cache", "verify").exit_code == 1
    assert invoke("cache", "verify").exit_code == 0
    assert f"dropped {shared['entries'] - 1} entries" in invoke("cache", "clear", "--tier", "shared").output
    assert list((tmp_path / "shared" / "default").iterdir()) == []
    assert facts(invoke("cache", "stats", "--json"))["entries"] == disk["entries"]


def test_a_cap_for_every_tier(invoke, documents):
    invoke("add", documents)
    for tier in ("device", "host", "disk", "shared"):
        assert "limit 300.0 kB" in invoke("cache", "limit", "300kB", "--tier", tier).output
    by_tier = facts(invoke("cache", "stats", "--json"))["by_tier"]
    assert {totals["limit_bytes"] for totals in by_tier.values()} == {300_000}
    assert 0 < by_tier["disk"]["bytes"] <= 300_000
    assert 0 < by_tier["shared"]["bytes"] <= 300_000
    assert facts(invoke("ask", GLORRIC, "--json"))["text"] == "walnut"


def test_what_another_machine_computed_is_not_computed_again(invoke, documents, tmp_path):
    first = facts(invoke("add", documents, "--json"))
    again = facts(invoke("add", documents, "--home", tmp_path / "second home", "--json"))
    assert (first["chunk_kv_computed"] > 0, again["chunk_kv_computed"]) == (True, 0)


def test_a_tier_that_there_is_not(invoke, documents):
    invoke("add", documents)
    for words in (("limit", "1GB"), ("clear",), ("verify",)):
        refused = invoke("cache", *words, "--tier", "dsik")
        assert isinstance(refused.exception, InvalidRequest)
        assert "device, host, disk, shared" in str(refused.exception)
