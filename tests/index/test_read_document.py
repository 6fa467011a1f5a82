"""Each file is read into a document, or the reason is raised."""

import gzip
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fpdf import FPDF

from kvweave.documents import readers
from kvweave.documents.readers import digest_file
from kvweave.errors import InaccessibleDocument, MissingExtra, UnreadableDocument
from support.document_files import read_document


def written(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def pdf_bytes(*pages: str, title: str = "", password: str = "") -> bytes:
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    if title:
        pdf.set_title(title)
    for page in pages:
        pdf.add_page()
        if page:
            pdf.multi_cell(0, 8, page)
    if password:
        pdf.set_encryption(owner_password=password, user_password=password)
    return bytes(pdf.output())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("naïve 😀\n".encode(), "naïve 😀\n"),
        (b"\xef\xbb\xbfmarked\n", "marked\n"),
        ("\ufeffgrüße\n".encode("utf-16-le"), "grüße\n"),
        ("\ufeffgrüße\n".encode("utf-16-be"), "grüße\n"),
        ("\ufeffgrüße\n".encode("utf-32-le"), "grüße\n"),
        ("Café über alles, said “he”\n".encode("cp1252"), "Café über alles, said “he”\n"),
        ("caf\xe9 \x81 control\n".encode("latin-1"), "caf\xe9 \x81 control\n"),
        (b"dos\r\nand old mac\rlines\n", "dos\nand old mac\nlines\n"),
        (b"a log with \x1b[31mcolour\x1b[0m\n", "a log with \x1b[31mcolour\x1b[0m\n"),
    ],
)
def test_encodings(tmp_path: Path, data: bytes, text: str) -> None:
    document = read_document(written(tmp_path, "notes.txt", data))
    assert document.text == text
    assert document.digest == hashlib.sha256(data).hexdigest() == digest_file(tmp_path / "notes.txt")
    assert document.source == str(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.md", b" \n\t\n", "empty"),
        ("program", b"\x7fELF\x02\x01\0\0\0rest", "NUL"),
        ("text.txt", b"some text\0more", "NUL"),
        ("noise.dat", bytes(range(1, 256)) * 10, "control characters"),
        ("odd.txt", bytes((n * 73 + 11) % 224 + 32 for n in range(2000)), "encoding is uncertain"),
        ("odd.txt", b"\xff\xfea", "damaged text"),
        ("bad.txt.gz", b"not gzip at all", "damaged gzip"),
        ("cut.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-20], "damaged gzip"),
        ("bad.pdf", b"%PDF-1.4 nothing more", "damaged PDF"),
        ("empty.html", b"<script>only()</script>", "no text"),
    ],
)
def test_unreadable_files_raise_the_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableDocument, match=reason):
        read_document(written(tmp_path, name, data))


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "secret.txt", "text")
    if os.geteuid() == 0:  # root may read everything: simulate the refusal

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    else:
        path.chmod(0)
    for read in (read_document, digest_file):
        with pytest.raises(InaccessibleDocument, match="no permission"):
            read(path)


def test_vanished_file(tmp_path: Path) -> None:
    for read in (read_document, digest_file):
        with pytest.raises(InaccessibleDocument, match="no longer exists"):
            read(tmp_path / "gone.txt")


def test_a_pipe_that_replaced_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "was.txt")
    for read in (read_document, digest_file):
        with pytest.raises(InaccessibleDocument, match="not a regular file"):
            read(tmp_path / "was.txt")
    with pytest.raises(InaccessibleDocument, match="cannot be read"):
        read_document(tmp_path)


def test_too_large_plain_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_TEXT_BYTES", 2**20)
    assert read_document(written(tmp_path, "fits.txt", b"x" * 2**20)).text
    with pytest.raises(UnreadableDocument, match="larger than 1 MiB"):
        read_document(written(tmp_path, "large.txt", b"x" * (2**20 + 1)))
    with pytest.raises(UnreadableDocument, match="unpacked, larger than 1 MiB"):
        read_document(written(tmp_path, "bomb.txt.gz", gzip.compress(b"x" * 2**24)))


def test_a_gzip_file_has_its_inner_kind(tmp_path: Path) -> None:
    document = read_document(written(tmp_path, "page.html.gz", gzip.compress(b"<title>T</title><p>seen</p>")))
    assert (document.text.strip(), document.title) == ("seen", "T")
    assert read_document(written(tmp_path, "changelog.gz", gzip.compress(b"v1\n"))).title == "changelog"


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.md", "intro\n```\n# not this\n```\n## Real title ##\n# later\n", "Real title"),
        ("b.md", "Set\n===\ntext\n", "Set"),
        ("c.rst", "Heading\n-------\ntext\n", "Heading"),
        ("d.txt", "just text\n", "d.txt"),
        ("e.py", "# a comment\nx = 1\n", "e.py"),
    ],
)
def test_titles(tmp_path: Path, name: str, text: str, title: str) -> None:
    document = read_document(written(tmp_path, name, text))
    assert (document.title, document.text) == (title, text)


def test_pdf(tmp_path: Path) -> None:
    data = pdf_bytes("The harbour opens at six.", "Second page.", title="Harbour rules")
    document = read_document(written(tmp_path, "rules.pdf", data))
    assert document.text == "The harbour opens at six.\n\nSecond page."
    assert document.title == "Harbour rules"


def test_pdf_encrypted_and_without_text(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match="encrypted"):
        read_document(written(tmp_path, "locked.pdf", pdf_bytes("secret", password="pw")))
    with pytest.raises(UnreadableDocument, match="text layer"):
        read_document(written(tmp_path, "scan.pdf", pdf_bytes("")))


def test_truncated_pdf_is_read_or_refused(tmp_path: Path) -> None:
    whole = pdf_bytes("The harbour opens at six.")
    refused = 0
    for length in range(0, len(whole), len(whole) // 12):
        try:
            assert "harbour" in read_document(written(tmp_path, "cut.pdf", whole[:length])).text
        except UnreadableDocument:
            refused += 1
    assert refused


def test_reading_sloppy_pdfs_in_threads_is_silent_and_changes_nothing_for_others(tmp_path: Path) -> None:
    script = """
import logging, sys, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from kvweave.documents.readers import read_file
logging.basicConfig(level=logging.WARNING)
filters = list(warnings.filters)
with ThreadPoolExecutor(3) as pool:
    texts = list(pool.map(lambda _: read_file(Path(sys.argv[1])).documents[0].text, range(30)))
assert len(set(texts)) == 1 and "harbour" in texts[0]
assert warnings.filters == filters
assert logging.getLogger().level == logging.WARNING
logging.Logger.setLevel = warnings.catch_warnings = None  # once loaded, nothing process-wide is touched
read_file(Path(sys.argv[1]))
"""
    whole = pdf_bytes("The harbour opens at six.")
    path = written(tmp_path, "sloppy.pdf", b"junk\n" + whole)
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_pypdf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtra, match=r"kvweave\[pdf\]"):
        read_document(written(tmp_path, "a.pdf", pdf_bytes("text")))
