"""The comparison of whole systems by `kvweave eval personas`."""

import json

from kvweave_lab.eval.personas import background, model, users

FEW = "eval personas --users 1 --questions 2 --seeds 1 --further 0 --ablations 0".split()
QUICK = (*FEW, "--shape", "reference", "--repeats", "1", "--quiet")


def test_every_system_is_in_both_tables_and_a_second_run_adds_nothing(
    command, tmp_path, request, monkeypatch
):
    """With few notes and short summaries, which take most of the time: what the systems make of them is for `tests/eval`."""
    monkeypatch.setattr(users, "NOTES", 4)
    monkeypatch.setattr(background, "ROUNDS_PER_PART", 1)
    monkeypatch.setattr(model, "_REQUEST_TOKENS", 24)
    folder = tmp_path / "out"
    short = ("--answers", "short")  # `tests/eval` has both lengths of replies
    text = command(*QUICK, *short, "--output", folder, timeout_s=600).stdout
    assert "A · projection reuse" in text
    assert "RAGCache + Sleep-time" in text
    content = json.loads((folder / "personas.json").read_text("utf-8"))
    assert content["about"]["command"].startswith("kvweave eval personas --users 1")
    assert {row["table"] for row in content["systems"]} == {"A", "B"}
    assert len(content["systems"]) == 8 * 2 * 2  # systems, ways of decoding, tables
    assert {(row["answers"], row["decoding"]) for row in content["systems"]} == {
        ("short", "token"),
        ("short", "lookup"),
    }
    assert len(content["users"]) == 32
    assert {row["system"] for row in content["pairs"]} == {"PerCache", "kvweave"}
    assert all(row["questions"] == 2 for row in content["systems"])
    assert (folder / "personas.png").read_bytes().startswith(b"\x89PNG")

    log = (folder / "sessions.jsonl").read_bytes()
    request.getfixturevalue("undrawn")
    fewer = ("--decoding", "token", "--costs", folder / "personas.json")
    command(*QUICK, *short, "--output", folder, *fewer, timeout_s=600)
    assert (folder / "sessions.jsonl").read_bytes() == log
    again = json.loads((folder / "personas.json").read_text("utf-8"))
    assert again["costs"] == content["costs"]
    assert {(row["answers"], row["decoding"]) for row in again["systems"]} == {("short", "token")}


def test_unknown_lengths_and_ways_of_decoding_are_refused(command):
    for option, known in (("--answers", "short, long"), ("--decoding", "token, lookup")):
        refused = command(*QUICK, option, "other", code=1)
        assert f"choose among {known}" in " ".join(refused.stderr.split())


def test_a_split_without_users_is_refused(command):
    refused = command(*QUICK, "--split", "hidden", code=1)
    assert "choose one of dev, test" in " ".join(refused.stderr.split())


def test_a_folder_of_another_evaluation_is_refused(command, tmp_path):
    (tmp_path / "sessions.jsonl").write_text('{"journal": 1}\n')
    refused = command(*QUICK, "--output", tmp_path, code=1)
    assert "name another --output" in " ".join(refused.stderr.split())
