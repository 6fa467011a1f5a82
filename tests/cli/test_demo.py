"""kvweave demo through the real command, with the shipped model."""


def test_plain_reuse_misses_what_one_chunk_needs_of_another_and_the_default_recipe_does_not(command):
    found = command.json("demo", "--no-speed")
    assert found["speed"] is None
    expected = {row["question"]: row["expected"] for row in found["questions"]}
    answers = {
        name: {row["question"]: row[name] for row in found["questions"]}
        for name in ("full_answer", "answer", "plain_reuse_answer")
    }
    assert answers["full_answer"] == answers["answer"] == expected
    missed = {
        question for question, answer in answers["plain_reuse_answer"].items() if answer != expected[question]
    }
    assert 0 < len(missed) < len(expected) / 2
    told = command("demo", "--no-speed", "--quiet").stdout
    assert told.count("✗") == len(missed)
    assert told.count("✓") == 3 * len(expected) - len(missed)
