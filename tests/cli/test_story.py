"""A stranger's first minutes and a request from top to bottom, through the real command."""

import signal
import time

from kvweave.samples import DOCUMENTS
from support.processes import Program

GLORRIC = "What is the password of Glorric?"


def test_add_ask_list_change_remove(real_command, command, documents):
    """What changes something is a real process; what shows it runs in this one (both have the same home)."""
    added = real_command.json("add", documents)
    assert len(added["added"]) == 3
    assert added["chunk_kv_computed"] == added["chunks"] > 3

    answer = real_command.json("ask", GLORRIC)
    assert set(answer) == {
        "text",
        "sources",
        "plan",
        "timing",
        "decoding",
        "reasoning",
        "finish_reason",
        "supported",
    }
    assert answer["text"] == "walnut"
    assert str(documents / "passwords.md") in {source["document"] for source in answer["sources"]}
    assert (
        answer["plan"]["fresh_tokens"]
        == answer["plan"]["spans"][-1]["end"] - answer["plan"]["spans"][-1]["start"]
    )
    assert 0 < answer["timing"]["ttft_s"] <= answer["timing"]["total_s"]

    again = command("add", documents).stdout
    assert "3 unchanged" in again
    assert "KV computed for 0" in again

    told = command("ask", GLORRIC, "--explain", "--recipe", "prefix").stdout
    assert told.startswith("walnut\n")
    assert "passwords.md" in told
    assert "the question is always computed" in told
    assert "recompute" in told

    assert {document["title"] for document in command.json("ls")} == {
        "passwords.md",
        "badges.txt",
        "supper.md",
    }
    stats = command.json("cache", "stats")
    assert stats["bytes"] <= stats["limit_bytes"]
    assert stats["hits"] > 0

    assert real_command.json("rm", documents / "passwords.md")["removed"] == [str(documents / "passwords.md")]
    # What is not found may be told at length.
    assert real_command.json("ask", GLORRIC, "--max-new-tokens", "8")["text"] != "walnut"
    assert command.json("cache", "verify")["damaged"] == []
    findings = {finding["name"]: finding for finding in command.json("doctor")}
    assert all(finding["ok"] for finding in findings.values())
    assert "2 documents" in findings["knowledge base"]["detail"]
    assert "weave-shifted, since it was not calibrated" in findings["recipe auto"]["detail"]


def test_ctrl_c_while_indexing_gives_advice_and_loses_nothing(real_command, command, documents, tmp_path):
    for number in range(5):
        (documents / f"{number}.txt").write_text(
            f"Box {number}.\n" + (DOCUMENTS / "boxes.md").read_text().replace("movers", "helpers") * 2
        )
    store = tmp_path / "home" / "kb" / "default" / "kv"
    deadline = time.monotonic() + 120
    with Program(["-m", "kvweave", "add", documents, "--quiet"], real_command.environment) as process:
        while len(list(store.rglob("*.safetensors"))) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors

    assert command.json("ask", GLORRIC)["text"] == "walnut"  # from documents that are indexed already
    resumed = real_command.json("add", documents)
    assert resumed["chunk_kv_computed"] > 0
    stats = command.json("cache", "stats")
    assert stats["damaged"] == 0
    assert command.json("cache", "verify")["damaged"] == []
    assert command.json("add", documents)["chunk_kv_computed"] == 0
