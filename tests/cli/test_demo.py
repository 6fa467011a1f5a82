"""kvweave demo through the real command, with the shipped model."""

from kvweave.cli import demo


def test_plain_reuse_misses_what_one_chunk_needs_of_another_and_the_default_recipe_does_not(
    command, monkeypatch, tmp_path
):
    sample_kb = demo._sample_kb  # the second run finds what the first one has indexed
    monkeypatch.setattr(demo, "_sample_kb", lambda _: sample_kb(tmp_path / "demo"))
    ask_all, asked = demo._ask_all, []
    monkeypatch.setattr(demo, "_ask_all", lambda base: asked or asked.extend(ask_all(base)) or asked)
    found = command.json("demo", "--no-speed")
    assert found["speed"] is None
    rows = found["questions"]
    for row in rows:
        assert row["full_answer"] == row["answer"] == row["expected"]
    missed = [row for row in rows if row["plain_reuse_answer"] != row["expected"]]
    assert 0 < len(missed) < len(rows) / 2
    assert len(asked) == len(rows)
    told = command("demo", "--no-speed", "--quiet").stdout
    assert told.count("✗") == len(missed)
    assert told.count("✓") == 3 * len(rows) - len(missed)
