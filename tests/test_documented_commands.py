"""Commands that the documentation shows are ones that there are."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from kvweave.cli.app import app
from kvweave.recipes.methods import METHODS

ROOT = Path(__file__).parent.parent


def shown_commands() -> list[str]:
    """Every command of kvweave's that a page shows, in a block or within a line."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/**/*.md")]
    pages += ROOT.glob("integrations/**/*.md")
    found = set()
    for page in [*pages, *ROOT.glob("src/kvweave/models/*/README.md")]:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
        shown = [*re.findall(r"`(kvweave [^`]+)`", text), *re.findall(r"^(kvweave .+)$", blocks, re.M)]
        found.update(one.strip() for line in shown for one in line.split(";"))
    return sorted(line for line in found if line.startswith("kvweave "))


@pytest.mark.parametrize("line", shown_commands())
def test_commands_in_the_documentation_are_ones_that_there_are(line):
    command = top = typer.main.get_command(app)
    names = {"--help"}
    for word in shlex.split(line, comments=True)[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in names, f"{command.name} has no {word}"
        elif isinstance(command, typer.core.TyperGroup) and (found := command.get_command(None, word)):
            command = found
        else:
            assert command is not top, f"there is no command {word}"
        names |= {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }


@pytest.mark.parametrize("words", [[], ["cache"], ["bench"], ["eval"]])
def test_lists_of_commands_cut_no_summary_at_80_columns(words):
    command = typer.main.get_command(app)
    for word in words:
        command = command.get_command(None, word)
    context = command.make_context("kvweave", [], resilient_parsing=True, max_content_width=80)
    listed = command.get_help(context).partition("Commands:")[2]
    assert listed.count("\n  ") > 3
    assert "..." not in listed


def test_tables_of_papers_are_repeated_with_the_recipes_they_compare():
    page = (ROOT / "lab" / "docs" / "evaluation.md").read_text()
    section = page.partition("## The papers' tables on a GPU")[2]
    rows = re.findall(r"^\| (\w+), .+ \| `(kvweave eval --.+)` \|$", section, re.M)
    assert {paper for paper, _ in rows} == {"ProphetKV", "FusionRAG", "CacheClip"}
    for paper, command in rows:
        words = shlex.split(command)
        named = {words[place + 1] for place, word in enumerate(words) if word == "--recipe"}
        assert "--matrix" in words or {paper.lower(), "cacheblend"} <= named, command
        assert named <= set(METHODS), command
