"""Text of documents and names of files on a terminal: their control characters do nothing, and every encoding will do."""

import json
import re

import pytest
from rich.text import Text

from kvweave.cli.terminal import echo

RECIPE = "reuse"
ESCAPES = "\x1b]0;owned\x07\x1b[8mhidden\x1b[0m\x9b8m\x1b]8;;http://evil.invalid/\x1b\\look\x1b]8;;\x1b\\"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
GLORRIC = "What is the password of Glorric?"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "hidden\x1b[8m.txt").write_text(f"The password of Glorric is walnut.{ESCAPES}\n")
    (folder / "arrow.txt").write_text("The badge of Sendbel \N{RIGHTWARDS ARROW} Zo\xe9 has it.\n")
    (folder / "title\x1b]0;owned\x07.zip").write_bytes(b"PK\x03\x04")
    (folder / "a.[bold]").write_text("There is soup on Friday.\n")
    return folder


def test_control_characters_of_documents_are_shown_as_symbols(command, folder):
    told = [
        command("add", folder),
        command("ls"),
        command("search", "Glorric"),
        command("ask", GLORRIC, "--explain", "--max-new-tokens", "4"),
        command("chat", "--max-new-tokens", "4", input_text=f"{GLORRIC}\n\n"),
        command("rm", folder / "gone\x1b[8m.txt", code=1),
    ]
    for each in told:
        assert not CONTROL.search(each.stdout + each.stderr)
    added, listed, found, asked, _, refused = told
    assert "1 .[bold]" in added.stdout
    assert "title\u241b]0;owned" in added.stderr
    assert f"{folder}/hidden\u241b[8m.txt\t" in listed.stdout
    assert "is walnut.\u241b]0;owned" in found.stdout
    assert "hidden\u241b[8m.txt [0:" in asked.stdout
    assert "gone\u241b[8m.txt" in refused.stderr
    assert f"{folder}/hidden\x1b[8m.txt" in {each["source"] for each in command.json("ls")}


def test_an_answer_is_harmless_piece_by_piece(capsys):
    for piece in ("walnut", "\x1b", "[8m", "\n"):
        echo(piece, end="")
    assert capsys.readouterr().out == "walnut\u241b[8m\n"


def test_colours_of_a_command_remain(monkeypatch):
    from kvweave.cli.output import STDOUT

    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = type(STDOUT)(force_terminal=True, color_system="standard")
    with coloured.capture() as shown:
        coloured.print(Text.assemble(("skipped ", "yellow"), "a\x1b[8m"))
    assert shown.get() == "\x1b[33mskipped \x1b[0ma\u241b[8m\n"


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_what_the_output_cannot_encode_is_replaced(command, folder, encoding):
    command("add", folder)
    command.environment["PYTHONIOENCODING"] = encoding
    assert "The badge of Sendbel \\u2192 Zo" in command("search", "Sendbel").stdout
    printed = command("search", "Sendbel", "--json").stdout
    assert printed.isascii()
    assert "The badge of Sendbel \u2192 Zo\xe9 has it." in json.loads(printed)[0]["source"]["text"]
