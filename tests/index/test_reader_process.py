"""A reader that crashes, hangs, prints or takes all memory costs its file, and nothing else."""

import os
import subprocess
import sys
import threading
import time

import pytest

from kvweave.cancellation import cancellable
from kvweave.documents import reader_process
from kvweave.documents.reader_process import FileReader
from kvweave.documents.readers import read_file
from kvweave.errors import Cancelled, InaccessibleDocument, MissingExtra, UnreadableDocument
from support import document_files as files

READS = """
class images:
    def img_element(function):
        return function
def convert_to_html(*args, **options):
    {body}
    class Result:
        value = "<p>It opens at six.</p>"
    return Result
"""


@pytest.fixture
def reader():
    with FileReader() as reader:
        yield reader


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return a function that puts a library with this code in place of the one that reads .docx."""

    def put(body):
        folder = tmp_path / "library"
        folder.mkdir()
        (folder / "mammoth.py").write_text(READS.format(body=body))
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    return put


@pytest.fixture
def word(tmp_path):
    path = tmp_path / "a.docx"
    path.write_bytes(files.docx())
    return path


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "a.html"
    path.write_text("<h1>Rules</h1><p>The harbour opens at six.")
    return path


def test_risky_files_are_read_in_one_other_process_with_the_same_result(reader, word, page):
    assert reader.read(word) == read_file(word)
    first = reader.process
    assert reader.read(page) == read_file(page)
    assert reader.process is first
    assert first.pid != os.getpid()
    reader.close()
    assert first.poll() is not None


def test_plain_text_starts_no_process(reader, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert reader.read(tmp_path / "a.txt").documents[0].text == "text"
    assert reader.process is None


@pytest.mark.parametrize("death", ["__import__('os').abort()", "__import__('os')._exit(3)"])
def test_a_crash_is_the_reason_and_the_next_file_is_read(reader, library, word, page, death):
    library(death)
    with pytest.raises(UnreadableDocument, match="its reader crashed"):
        reader.read(word)
    assert "harbour" in reader.read(page).documents[0].text


@pytest.mark.parametrize("loop", ["__import__('time').sleep(1000)", "while True: pass"])
def test_a_reader_that_takes_too_long_is_ended(reader, library, word, page, monkeypatch, loop):
    library(loop)
    assert reader.read(page)  # the process has started
    monkeypatch.setattr(reader_process, "STEP_LIMIT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(UnreadableDocument, match="no further in 1 s"):
        reader.read(word)
    assert time.monotonic() - began < 20
    monkeypatch.undo()
    assert reader.read(page)


def test_a_file_that_takes_all_memory_is_refused(reader, library, word, page):
    library("bytearray(8 * 2**30)")
    with pytest.raises(UnreadableDocument, match="GiB of memory"):
        reader.read(word)
    assert reader.read(page)


def test_what_a_library_prints_does_no_harm(reader, library, word):
    library("print('x' * 100000); __import__('os').write(1, b'noise')")
    assert reader.read(word).documents[0].text == "It opens at six.\n"


def test_reasons_arrive_as_they_are_raised(reader, tmp_path, library):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 nothing more")
    with pytest.raises(UnreadableDocument, match="damaged PDF"):
        reader.read(tmp_path / "a.pdf")
    with pytest.raises(InaccessibleDocument, match="no longer exists"):
        reader.read(tmp_path / "gone.pdf")


def test_a_missing_library_arrives_as_such(reader, tmp_path, word, monkeypatch):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "mammoth.py").write_text("raise ImportError('no mammoth')")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(MissingExtra, match=r"kvweave\[documents\]"):
        reader.read(word)


def test_a_caller_that_gives_up_is_not_kept_waiting(reader, library, word):
    library("__import__('time').sleep(1000)")
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    with cancellable(given_up.is_set), pytest.raises(Cancelled):
        reader.read(word)
    assert reader.process is None


def test_the_process_ends_with_the_one_that_started_it(tmp_path, page):
    script = (
        "import sys, os, pathlib\nfrom kvweave.documents.reader_process import FileReader\nreader = FileReader()\n"
        "reader.read(pathlib.Path(sys.argv[1]))\nprint(reader.process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(page)], capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
