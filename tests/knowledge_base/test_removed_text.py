"""The text of a removed or changed document is in no file of the knowledge base, after the time that the file format promises."""

import sqlite3
from contextlib import closing

import pytest

from support.tiny_kb import open_tiny, text

MARKER = b"qzxvbwalnutmarker"


@pytest.fixture(autouse=True)
def plain_sqlite(monkeypatch):
    """SQLite as built without SQLITE_SECURE_DELETE: a connection that asks for nothing does not overwrite what it deletes."""
    connect = sqlite3.connect

    def plain(*args, **kwargs):
        made = connect(*args, **kwargs)
        made.execute("PRAGMA secure_delete = OFF")
        return made

    monkeypatch.setattr(sqlite3, "connect", plain)


@pytest.fixture
def base(tiny, tmp_path):
    with open_tiny(tmp_path / "home") as base:
        yield base


@pytest.fixture
def folder(tmp_path):
    """25 files, so that removing one of them deletes less than a tenth of the rows."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(24):
        (folder / f"{number}.txt").write_text(text(number))
    (folder / f"{MARKER.decode()}.txt").write_text(f"{text(24)} It is {MARKER.decode()} in the end.")
    return folder


def files_with_text(base):
    return [path for path in base.folder.rglob("*") if path.is_file() and MARKER in path.read_bytes().lower()]


@pytest.mark.parametrize("changed", [False, True])
def test_removed_text_is_in_no_file_after_the_next_add(base, folder, monkeypatch, changed):
    base.add(folder)
    path = folder / f"{MARKER.decode()}.txt"
    assert files_with_text(base)
    if changed:
        path.rename(folder / "other.txt")
        base.add(folder)
        (folder / "other.txt").write_text(text(25))
        base.add(folder)
    else:
        path.unlink()
        base.remove(path)
    assert {file.suffix for file in files_with_text(base)} <= {".lance"}  # which another process may read
    monkeypatch.setattr("kvweave.documents.indexing.SWEEP_GRACE_S", 0.0)  # as if a minute had passed
    assert base.add(folder).chunks == 0
    assert files_with_text(base) == []
    assert not base.lost_documents()
    assert base.passages("river", top_k=30)


def test_what_a_killed_removal_has_not_forgotten_goes_with_the_next_add(base, folder):
    with closing(sqlite3.connect(base.folder / "catalog.sqlite")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM documents").fetchall()  # the log cannot begin anew before this ends
        base.add(folder)
        path = folder / f"{MARKER.decode()}.txt"
        path.unlink()
        base.state.remove(str(path))  # as a process that is killed after the commit
    assert any(file.name.endswith("-wal") for file in files_with_text(base))
    assert base.state.has_removed_text
    base.add(folder)
    assert not base.state.has_removed_text
    assert not any(file.name.startswith("catalog") for file in files_with_text(base))
    assert base.add(folder).removed == ()
