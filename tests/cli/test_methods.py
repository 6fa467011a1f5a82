"""Recipes, preparations and budgets on the command line, and in the output of --explain."""

import re

GLORRIC = "What is the password of Glorric?"


def test_a_prompt_is_explained_token_by_token(command, real_command, documents):
    command("add", documents, "--prepare", "similar", "--quiet")
    asked = (
        "ask",
        GLORRIC,
        "--recipe",
        "prophetkv",
        "--prepare",
        "similar",
        "--coverage",
        "0.3",
        "--explain",
    )
    answer = command.json(*asked)
    plan = answer["plan"]
    assert (plan["recipe"], plan["coverage"]) == ("similar+prophetkv", 0.3)
    origins = [token["origin"] for token in answer["tokens"]]
    for origin in ("exact", "reused", "recomputed", "fresh"):
        assert origins.count(origin) == plan[f"{origin}_tokens"]
    assert plan["recomputed_tokens"] > 0
    assert GLORRIC in "".join(token["text"] for token in answer["tokens"])

    told = command(*asked, "--fresh").stdout  # the same question again would get the cached answer
    assert "similar+prophetkv, coverage 0.3" in told
    assert "stored for any position (similar-10-int8)" in told
    assert re.search(rf"{plan['recomputed_tokens']} +recomputed +had stored KV", told)
    assert GLORRIC in told
    assert "--json lists every token" in told

    colours = real_command(*asked, "--fresh", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[36m" in colours  # reused
    assert "\x1b[30;43m" in colours  # recomputed
    assert GLORRIC in re.sub(r"\x1b\[[\d;]*m", "", colours)


def test_one_budget_and_known_names(command, indexed_home):
    refused = command("ask", GLORRIC, "--ratio", "0.1", "--coverage", "0.2", code=1)
    assert "both ratio 0.1 and coverage 0.2 are given" in refused.stderr
    refused = command("ask", GLORRIC, "--prepare", "boiled", code=1)
    assert "choose one of bare, isolated, similar, following" in refused.stderr
    # An option overrides the environment variable of the other one.
    answer = command("ask", GLORRIC, "--ratio", "0", KVWEAVE_COVERAGE="0.2", KVWEAVE_PREPARE="similar")
    assert answer.stdout.startswith("walnut")
