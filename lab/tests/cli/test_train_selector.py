"""kvweave train-selector through the real command, and its result named as --auxiliary."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import InvalidRequest


def test_a_selector_is_tuned_on_questions_to_a_knowledge_base_and_used(
    command, indexed_home, indexed_once, tmp_path
):
    folder, asked = tmp_path / "selector", tmp_path / "questions.txt"
    names = "Glorric Mirrok Tessa Orlan Brannic".split()
    asked.write_text("\n\n".join(f"What is the password of {name}?" for name in names))
    words = ("train-selector", "--questions", asked, "--steps", "2", "--output", folder, "--quiet")
    told = json.loads(command(*words, "--json").stdout)
    assert (told["trained_on"], told["held_out"], len(told["losses"])) == (4, 1, 2)
    assert told["after"]["kl"] != told["before"]["kl"]

    command("add", indexed_once / "documents", "--recipe", "cacheclip", "--auxiliary", folder, "--quiet")
    kinds = command.json("cache", "stats")["by_kind"]
    assert len([kind for kind in kinds if kind.startswith("auxiliary-")]) == 1
    ask = ("ask", "What is the password of Glorric?", "--recipe", "cacheclip", "--auxiliary", folder)
    plan = command.json(*ask, "--ratio", "0.5")["plan"]
    assert sum(span["recomputed_tokens"] for span in plan["spans"]) > 0


def test_without_questions_prompts_are_generated(command, tmp_path):
    folder = tmp_path / "selector"
    words = ("train-selector", "--samples", "1", "--steps", "1", "--output", folder, "--quiet")
    said = command(*words).stdout
    assert "before" in said
    assert "after" in said
    assert f"--auxiliary {folder}" in said


def test_a_file_without_questions_is_refused_before_anything_is_loaded(tmp_path):
    empty = tmp_path / "none.txt"
    empty.write_text(" \n\n")
    words = ["train-selector", "--questions", str(empty), "--output", str(tmp_path / "x")]
    with pytest.raises(InvalidRequest, match="holds no questions"):
        CliRunner().invoke(app, words, catch_exceptions=False)
