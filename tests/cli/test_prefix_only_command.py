"""A hybrid model from the command line: every command in a process of its own, so that states come from files."""

import pytest

from kvweave.testing import tiny_tokenizer
from support.refused_models import refused_model

QUESTION = ("What is the password of Glorric?", "--top-k", "2", "--max-new-tokens", "4", "--fresh")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "hybrid"
    refused_model("qwen3_next").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_add_ask_and_ask_again_with_recipe_prefix(real_command, documents, model):
    added = real_command.json("add", documents, "--model", model, "--quiet")
    assert added["chunk_kv_computed"] == 0
    cold, warm = (real_command.json("ask", *QUESTION, "--recipe", "prefix", "--explain") for _ in range(2))
    assert warm["text"] == cold["text"]
    computed = [sum(token["origin"] == "fresh" for token in answer["tokens"]) for answer in (cold, warm)]
    assert computed[0] == len(cold["tokens"]) > 2 * computed[1]
    assert real_command.json("cache", "stats")["by_kind"]["state"]["entries"] == 3
    findings = {finding["name"]: finding for finding in real_command.json("doctor")}
    assert all(finding["ok"] for finding in findings.values())
    assert "linear_attention" in findings["recipe prefix alone"]["detail"]


def test_the_default_recipe_is_refused_in_one_line(command, documents, model):
    command("add", documents, "--model", model, "--quiet")
    refused = command("ask", *QUESTION, code=1)
    assert "--recipe prefix" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
