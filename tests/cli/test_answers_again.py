"""The answer cache and its evaluation through the real command."""

import json
import re
import subprocess
import sys

import pytest

GLORRIC = "What is the password of Glorric?"
AGAIN = "The password of Glorric?"


def test_a_repeated_question_reports_that_its_answer_is_cached(command, documents):
    command("add", documents, "--quiet")
    assert command.json("ask", GLORRIC)["plan"]["cache_hit"] is None
    told = command("ask", AGAIN, "--explain").stdout
    assert told.startswith("walnut\n")
    assert f"plan: cached answer to '{GLORRIC}'" in told
    assert "passwords.md" in told
    cache_hit = command.json("ask", AGAIN)["plan"]["cache_hit"]
    assert cache_hit["question"] == GLORRIC
    assert 0.85 <= cache_hit["similarity"] < 1
    assert command.json("ask", AGAIN, "--fresh")["plan"]["cache_hit"] is None
    assert command.json("ask", AGAIN)["plan"]["cache_hit"]["question"] == AGAIN

    (documents / "passwords.md").write_text("The password of Glorric is needle.")
    command("add", documents, "--quiet")
    changed = command.json("ask", GLORRIC)
    assert changed["text"] == "needle"
    assert changed["plan"]["cache_hit"] is None


def test_an_answer_of_another_question_is_rejected(command, indexed_home):
    command("ask", GLORRIC)
    refused = " ".join(command("cache", "reject", AGAIN, code=1).stderr.split())
    assert "got no answer of another question" in refused
    assert command.json("ask", AGAIN)["plan"]["cache_hit"]["question"] == GLORRIC
    assert f"no longer gets the answer to '{GLORRIC}'" in command("cache", "reject", AGAIN).stdout
    assert command.json("ask", AGAIN)["plan"]["cache_hit"] is None
    assert command.json("ask", AGAIN)["plan"]["cache_hit"]["question"] == AGAIN
    assert "0 as the model judged, 1 rejected" in " ".join(command("cache", "stats").stdout.split())


def test_one_line_says_what_was_reused_and_what_was_computed(command, indexed_home):
    line = r"(\d+)% of (\d+) prompt tokens reused, (\d+) computed; first token after"
    found = re.search(line, command("ask", GLORRIC, "--top-k", "1").stdout)
    share, tokens, computed = map(int, found.groups())
    assert 0 < computed < tokens
    assert share == round(100 * (1 - computed / tokens))


ASK_AND_LIST_IMPORTS = """
import sys
from kvweave.__main__ import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(*sorted({"torch", "transformers", "lancedb"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize("recipe", [(), ("--recipe", "following-exact+prophetkv", "--ratio", "0.3")])
def test_a_question_asked_again_is_answered_without_the_code_that_runs_models(command, indexed_home, recipe):
    def ask_in_a_new_process(question):
        words = [sys.executable, "-c", ASK_AND_LIST_IMPORTS, "ask", question, *recipe]
        done = subprocess.run(words, env=command.environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr.split()

    assert command.json("ask", GLORRIC, *recipe)["plan"]["cache_hit"] is None
    told, imported = ask_in_a_new_process(f" {GLORRIC.replace(' ', '  ')}")
    assert told.startswith("walnut\n")
    assert "cached answer to" in told
    assert imported == []
    if recipe:
        told = command("ask", AGAIN, *recipe).stdout
    else:  # other words are compared by their vectors
        told, imported = ask_in_a_new_process(AGAIN)
        assert "torch" in imported
    assert told.startswith("walnut\n")


def test_look_alikes_have_rows_tables_json_and_a_plot(command, tmp_path):
    few = ("eval", "lookalikes", "--paraphrases", "12", "--lookalikes", "16", "--quiet")
    told = command(*few, "--output", tmp_path / "out").stdout
    assert "false_hit_rate" in told
    assert "exchanged" in told
    plain = json.loads((tmp_path / "out" / "lookalikes.json").read_text("utf-8"))
    assert plain["about"]["command"].startswith("kvweave eval lookalikes --paraphrases 12")
    assert {"commit", "date", "machine"} <= plain["about"].keys()
    matchers = {"kvweave", "cosine", "cosine, guarded", "gptcache", "meancache", "vcache"}
    assert {row["matcher"] for row in plain["rows"]} == matchers
    assert (tmp_path / "out" / "lookalikes.png").read_bytes().startswith(b"\x89PNG")


def test_a_pool_that_is_not_there_is_named(command):
    refused = command("eval", "lookalikes", "--split", "hidden", "--quiet", code=1)
    assert "choose one of dev, test" in " ".join(refused.stderr.split())
