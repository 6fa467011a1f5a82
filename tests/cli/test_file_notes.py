"""What `add` and `ls` say of files that are doubtful, copies or skipped, and what `ask` says of places."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from support import document_files as files


@pytest.fixture
def invoke(tmp_path):
    runner = CliRunner(
        env={
            "KVWEAVE_HOME": str(tmp_path / "home"),
            "KVWEAVE_CHUNK_TOKENS": "48",
            "KVWEAVE_RECIPE": "reuse",
            "COLUMNS": "300",
        }
    )
    return lambda *words: runner.invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "scanned.pdf").write_bytes(files.pdf(*[""] * 9, "The password of Glorric is walnut."))
    (folder / "odd.txt").write_bytes("The password is Пароль Ивана, as he said.".encode("cp1251"))
    for name in ("one.md", "two.md"):
        (folder / name).write_text("# Towns\n\nThe harbour of Yorkport opens at six.\n")
    (folder / "all.zip").write_bytes(b"PK\x03\x04")
    (folder / "locked.pdf").write_bytes(files.pdf("secret", password="pw"))
    return folder


def test_doubts_copies_and_skipped_files_are_told(invoke, folder):
    told = invoke("add", folder)
    for line in (
        f"note {folder}/scanned.pdf: 9 of 10 pages have no text",
        f"note {folder}/odd.txt: encoding uncertain: read as Windows-1251",
        f"note {folder}/two.md: the same as {folder}/one.md; it counts once in a search",
        f"skipped {folder}/all.zip: an archive (.zip)",
        f"skipped {folder}/locked.pdf: PDF is password-protected",
    ):
        assert line in told.stderr
    assert "4 added; " in told.stdout
    assert "(2 .md, 1 .txt, 1 .pdf)\n" in told.stdout
    assert "\t9 of 10 pages have no text (scanned pages?)" in invoke("ls").stdout
    listed = {each["source"]: each for each in json.loads(invoke("ls", "--json").stdout)}
    assert listed[f"{folder}/scanned.pdf"]["notes"] == ["9 of 10 pages have no text (scanned pages?)"]
    assert listed[f"{folder}/odd.txt"]["notes"] == ["encoding uncertain: read as Windows-1251"]
    assert listed[f"{folder}/two.md"]["same_as"] == f"{folder}/one.md"


def test_json_has_doubts_copies_and_places(invoke, folder):
    report = json.loads(invoke("add", folder, "--json").stdout)
    assert {"path": f"{folder}/two.md", "same_as": f"{folder}/one.md"} in report["copies"]
    assert {"path": f"{folder}/scanned.pdf", "note": "9 of 10 pages have no text (scanned pages?)"} in report[
        "notes"
    ]
    answer = json.loads(invoke("ask", "When does the harbour of Yorkport open?", "--json").stdout)
    places = {source["document"]: source for source in answer["sources"]}
    assert (places[f"{folder}/one.md"]["heading"], places[f"{folder}/one.md"]["line"]) == ("Towns", 1)
    assert f"{folder}/two.md" not in places
    assert places[f"{folder}/scanned.pdf"]["page"] == 10
    said = invoke("ask", "When does the harbour of Yorkport open?").stdout
    assert f"{folder}/scanned.pdf [0:34] page 10" in said
    assert "line 1, Towns" in said
