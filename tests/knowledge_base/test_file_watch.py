"""Folders that are followed: what is created, changed and deleted there is in the knowledge base soon after."""

import threading
from contextlib import contextmanager
from queue import Queue

import pytest

from kvweave.errors import InvalidRequest
from support.tiny_kb import open_tiny, text


@contextmanager
def followed(base, *folders):
    """Follow in a thread; gives the queue of reports."""
    stop, reports = threading.Event(), Queue()

    def work():
        for report in base.follow(*folders, stop=stop):
            reports.put(report)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield reports
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def until(reports, done):
    """Return the sources added, changed and removed, once `done` holds of them."""
    added, changed, removed = set(), set(), set()
    while not done(added, changed, removed):
        report = reports.get(timeout=30)
        added |= set(report.added)
        changed |= set(report.changed)
        removed |= set(report.removed)
    return added, changed, removed


def test_created_changed_and_deleted_files_are_followed(tiny, tmp_path):
    folder = tmp_path / "notes"
    (folder / "below").mkdir(parents=True)
    first, second = folder / "first.txt", folder / "below" / "second.txt"
    first.write_text(text(1))
    with open_tiny(folder / "home") as base, followed(base, folder) as reports:  # its own files are no change
        assert reports.get(timeout=30).added == (str(first),)
        second.write_text(text(2))
        (folder / ".hidden.txt").write_text(text(3))
        first.write_text(text(4))
        added, changed, _ = until(reports, lambda added, changed, _: added and changed)
        assert (added, changed) == ({str(second)}, {str(first)})
        first.unlink()
        second.parent.rename(folder / "beside")
        moved = folder / "beside" / "second.txt"
        added, _, removed = until(reports, lambda added, _, removed: added and len(removed) == 2)
        assert (added, removed) == ({str(moved)}, {str(first), str(second)})
        assert [document.source for document in base.documents()] == [str(moved)]
        assert base.ask("what about the river", cache="off").sources


def test_only_folders_are_followed(tiny, tmp_path):
    (tmp_path / "note.txt").write_text(text(1))
    with (
        open_tiny(tmp_path / "home") as base,
        pytest.raises(InvalidRequest, match=r"note\.txt is a file, and only folders are watched"),
    ):
        next(base.follow(tmp_path / "note.txt"))
