"""The command lines of long decoding: its evaluation, and a resumed conversation."""

RECIPE = "reuse"  # prepares least; nothing here depends on it


def test_eval_decode_reports_rows_and_resumes_from_its_results(command, tmp_path):
    words = ["eval", "decode", "--task", "dialogue", "--samples", "1", "--seed", "0", "--length", "40"]
    words += ["--strategy", "dynakv", "--strategy", "window", "--prompt-tokens", "150"]
    words += ["--resident-bytes", "10MB", "--output", tmp_path / "out"]
    report = command.json(*words)
    assert [row["strategy"] for row in report["rows"]] == ["dense", "dynakv", "window"]
    assert report["about"]["command"].startswith("kvweave eval decode")
    assert (tmp_path / "out" / "decoding.html").exists()
    assert command.json(*words)["rows"] == report["rows"]  # equal latencies: nothing ran again
    assert report["about"]["model"] == "longer"
    too_long = command("eval", "decode", "--length", "9000", code=1)
    assert "more than the 8,704 positions of longer" in too_long.stderr


def test_another_process_resumes_a_conversation(command, documents):
    command("add", documents, "--quiet")
    first = chat(command, "What is the password of Glorric?\n")
    assert first == "walnut\n"
    assert chat(command, "What is the password of Glorric?\n", "--kv-budget", "1") != ""
    refused = command("chat", "--kv-budget", "0.5", input_text="Who?\n", code=1)
    assert "began with kv_budget 1, not 0.5" in refused.stderr
    assert chat(command, "What is the password of Glorric?\n", "--new") == first


def test_a_resumed_conversation_keeps_the_budget_that_it_began_with(command, documents):
    command("add", documents, "--quiet")
    chat(command, "What is the password of Glorric?\n", "--kv-budget", "0.5")
    assert chat(command, "And of Brannic?\n") != ""
    assert chat(command, "And of Glorric?\n", "--kv-budget", "0.5") != ""
    refused = command("chat", "--kv-budget", "1", input_text="Who?\n", code=1)
    assert "began with kv_budget 0.5, not 1; name that or none" in refused.stderr


def chat(command, question, *options) -> str:
    return command("chat", *options, input_text=question).stdout
