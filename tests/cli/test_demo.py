"""kvweave demo, with the shipped model."""

from kvweave import samples
from kvweave.samples import sample_questions


def test_plain_reuse_misses_what_one_chunk_needs_of_another_and_the_default_recipe_does_not(command):
    rows = len(sample_questions())
    told = command("demo", "--no-speed", "--quiet").stdout
    answers = [line for line in told.splitlines() if "✓" in line or "✗" in line]
    marks = [[mark for mark in line if mark in "✓✗"] for line in answers]
    assert len(marks) == rows
    assert all(full == default == "✓" for full, _, default in marks)
    assert 0 < sum(plain == "✗" for _, plain, _ in marks) < rows / 2
    assert "Time to first token" in told


def test_json_has_answers_and_times(command, monkeypatch):
    asked = sample_questions()[:2]
    monkeypatch.setattr(samples, "sample_questions", lambda: asked)
    found = command.json("demo", "--no-speed")
    assert found["speed"] is None
    assert [row["question"] for row in found["questions"]] == [question.text for question in asked]
    for row in found["questions"]:
        assert row["full_answer"] == row["answer"] == row["expected"]
        assert 0 < row["reused_share"] < 1
        assert all(row[f"{name}_ttft_s"] > 0 for name in ("full", "cold", "warm"))
        assert row["sources"]
