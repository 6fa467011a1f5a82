"""Files of many formats in a knowledge base: what is indexed, what is said of it, and where answers point."""

import sys
from dataclasses import asdict

import pytest

from kvweave.results import CopiedDocument, DocumentNote
from support import document_files as files
from support import tiny_kb


@pytest.fixture
def base(tiny, tmp_path):
    with tiny_kb.open_tiny(tmp_path / "home", chunk_tokens=100) as base:
        yield base


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    return folder


def sources(base):
    return [document.source for document in base.documents()]


def test_doubts_are_in_the_report_and_in_the_list_until_they_are_gone(base, folder):
    scanned, odd = folder / "scanned.pdf", folder / "odd.txt"
    scanned.write_bytes(files.pdf(*[""] * 9, "The harbour opens at six."))
    odd.write_bytes("The password is Пароль Ивана, as he said.".encode("cp1251"))
    report = base.add(folder)
    told = {"encoding uncertain: read as Windows-1251", "9 of 10 pages have no text (scanned pages?)"}
    assert {note.note for note in report.notes} == told
    assert {note for document in base.documents() for note in document.notes} == told
    assert report.notes[0] == DocumentNote(odd, "encoding uncertain: read as Windows-1251")
    assert "Пароль Ивана" in base.document_text(str(odd))
    assert base.add(folder).notes == ()
    odd.write_text("The password is Пароль Ивана, as he said.")
    assert base.add(folder).notes == ()
    assert [document.notes for document in base.documents() if document.source == str(odd)] == [()]


def test_a_copy_counts_once_and_this_is_said(base, folder):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("The harbour of Zyx opens at six.")
    (folder / "c.txt").write_text("The bell rings at noon in the north.")
    report = base.add(folder)
    assert report.copies == (CopiedDocument(folder / "b.txt", folder / "a.txt"),)
    assert [document.same_as for document in base.documents()] == ["", str(folder / "a.txt"), ""]
    found = base.passages("When does the harbour of Zyx open?", top_k=3)
    assert [source.document for source in found] == [str(folder / "a.txt"), str(folder / "c.txt")]
    base.remove(folder / "a.txt")
    assert [document.same_as for document in base.documents()] == ["", ""]
    found = base.passages("When does the harbour of Zyx open?", top_k=3)
    assert found[0].document == str(folder / "b.txt")


def test_attachments_come_stay_change_and_go_with_their_mail(base, folder):
    path = folder / "m.eml"

    def write(**texts):
        message = files.mail()
        for name, text in texts.items():
            message.add_attachment(text, filename=f"{name}.txt")
        path.write_bytes(bytes(message))

    write(one="The first text.", two="The second text.")
    assert base.add(folder).added == (str(path), f"{path}/one.txt", f"{path}/two.txt")
    again = base.add(folder)
    assert (len(again.unchanged), again.removed, again.chunks) == (3, (), 0)
    write(two="The second text.", three="The third text.")
    report = base.add(folder)
    assert (report.changed, report.added) == ((str(path),), (f"{path}/three.txt",))
    assert (report.unchanged, report.removed) == ((f"{path}/two.txt",), (f"{path}/one.txt",))
    assert sources(base) == [str(path), f"{path}/three.txt", f"{path}/two.txt"]
    assert "third" in base.document_text(f"{path}/three.txt")
    path.unlink()
    assert base.add(folder).kept == (str(path), f"{path}/three.txt", f"{path}/two.txt")
    assert len(base.add(folder, allow_empty=True).removed) == 3
    write(two="The second text.")
    base.add(folder)
    assert base.remove(path) == [str(path), f"{path}/two.txt"]
    assert base.documents() == []


def test_a_reply_in_another_file_does_not_repeat_the_mail(base, folder):
    body = "Agreed.\n\nOn Mon, 5 Jan 2026, Zoé wrote:\n> The password is walnut.\n"
    (folder / "a reply.eml").write_bytes(
        bytes(files.mail(body, identity="<2@example.org>", answers="<1@example.org>"))
    )
    (folder / "original.eml").write_bytes(bytes(files.mail()))
    base.add(folder)
    texts = [base.document_text(source) for source in sources(base)]
    assert ["walnut" in text for text in texts] == [False, True]


def test_a_reader_that_crashes_costs_its_file_alone(base, folder, tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    (library / "mammoth.py").write_text("import os\nos.abort()\n")
    monkeypatch.setattr(sys, "path", [str(library), *sys.path])
    (folder / "a.docx").write_bytes(files.docx())
    (folder / "b.pdf").write_bytes(files.pdf("The harbour opens at six."))
    report = base.add(folder)
    assert report.added == (str(folder / "b.pdf"),)
    ((skipped),) = report.skipped
    assert (skipped.path, "crashed" in skipped.reason) == (folder / "a.docx", True)


def test_a_plain_install_names_the_extra(base, folder, tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    (library / "python_calamine.py").write_text("raise ImportError\n")
    (folder / "a.xlsx").write_bytes(files.xlsx())
    monkeypatch.setattr(sys, "path", [str(library), *sys.path])
    (folder / "b.txt").write_text("The harbour opens at six.")
    report = base.add(folder)
    assert "pip install 'kvweave[documents]'" in report.skipped[0].reason
    assert report.added == (str(folder / "b.txt"),)


@pytest.mark.parametrize("name", ["docx", "pptx", "xlsx", "epub"])
def test_office_files_are_indexed_and_come_back_whole(base, folder, name):
    path = folder / f"a.{name}"
    path.write_bytes(getattr(files, name)())
    assert base.add(path).added == (str(path),)
    text = base.document_text(str(path))
    from support.document_files import read_document

    assert text.strip() == read_document(path).text.strip()


def test_sources_say_where_a_person_finds_them(base, folder):
    (folder / "a.pdf").write_bytes(
        files.pdf("The harbour opens.", "The qqq bell rings.", headings=["Day", "Noon"])
    )
    (folder / "b.md").write_text(
        "# Guide\n\nStart.\n\n## Setup\n\nThe zzz engine starts with a key.\n" + "x\n" * 90
    )
    base.add(folder)
    (found,) = [each for each in base.passages("qqq bell", top_k=5) if "qqq" in each.text]
    assert (found.page, found.line) == (1, None)  # both pages fit into one chunk
    (found, *_) = [each for each in base.passages("zzz engine", top_k=5) if "zzz" in each.text]
    assert (found.page, found.heading, found.line) == (None, "Guide > Setup", 7)
    answer = base.ask("Where is the zzz engine?")
    again = base.ask("Where is the zzz engine?")
    assert again.plan.cache_hit is not None
    assert {"page", "heading", "line"} <= asdict(again.sources[0]).keys()
    assert [asdict(source) for source in again.sources] == [asdict(source) for source in answer.sources]
    assert any(source.heading for source in again.sources)
