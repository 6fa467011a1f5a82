"""The command lines of long decoding: its evaluation, and a conversation that goes on."""


def test_the_evaluation_reports_rows_and_goes_on_where_it_stopped(command, tmp_path):
    words = ["eval", "decode", "--task", "dialogue", "--samples", "1", "--seed", "0", "--length", "40"]
    words += ["--strategy", "dynakv", "--strategy", "window", "--prompt-tokens", "150"]
    words += ["--resident-bytes", "10MB", "--output", tmp_path / "out"]
    told = command.json(*words)
    assert [row["strategy"] for row in told["rows"]] == ["dense", "dynakv", "window"]
    assert told["about"]["command"].startswith("kvweave eval decode")
    assert (tmp_path / "out" / "decoding.html").exists()
    assert command.json(*words)["rows"] == told["rows"]  # latencies too: nothing ran again
    assert told["about"]["model"] == "longer"
    beyond = command("eval", "decode", "--length", "9000", code=1)
    assert "more than the 8,704 positions of longer" in beyond.stderr


def test_a_conversation_goes_on_in_another_process(command, documents):
    command("add", documents, "--quiet")
    first = chat(command, "What is the password of Glorric?\n")
    assert first == "walnut\n"
    assert chat(command, "What is the password of Glorric?\n", "--kv-budget", "1") != ""
    refused = command("chat", "--kv-budget", "0.5", input_text="Who?\n", code=1)
    assert "began with kv_budget 1, not 0.5" in refused.stderr
    assert chat(command, "What is the password of Glorric?\n", "--new") == first


def chat(command, said, *words) -> str:
    return command("chat", *words, input_text=said).stdout
