"""Files that are gone: deleted, on a disk that is not mounted, or moved."""

import pytest

from support import document_files as files
from support.tiny_kb import open_tiny, text


@pytest.fixture
def base(tiny, tmp_path):
    with open_tiny(tmp_path / "home") as base:
        yield base


@pytest.fixture
def folder(tmp_path):
    """A folder with a file, and with a disk that has two."""
    folder = tmp_path / "notes"
    (folder / "disk" / "deep").mkdir(parents=True)
    for number, name in enumerate(("here.txt", "disk/a.txt", "disk/deep/b.txt")):
        (folder / name).write_text(text(number))
    return folder


def sources(base):
    return [document.source for document in base.documents()]


def test_a_folder_that_is_empty_now_keeps_its_documents_unless_told_otherwise(base, folder, tmp_path):
    base.add(folder)
    before = base.documents()
    away = tmp_path / "away"
    (folder / "disk").rename(away)  # as when a disk is unmounted
    (folder / "disk").mkdir()
    report = base.add(folder)
    assert report.kept == (f"{folder}/disk/a.txt", f"{folder}/disk/deep/b.txt")
    assert (report.removed, base.documents()) == ((), before)
    (folder / "here.txt").unlink()
    assert len(base.add(folder).kept) == 3
    (folder / "disk").rmdir()
    away.rename(folder / "disk")
    again = base.add(folder)
    assert (len(again.unchanged), again.kept, again.removed) == (2, (), (f"{folder}/here.txt",))
    for name in ("disk/a.txt", "disk/deep/b.txt"):
        (folder / name).unlink()
    assert len(base.add(folder, allow_empty=True).removed) == 2
    assert base.documents() == []


def test_a_link_to_a_disk_that_is_gone_keeps_its_documents(base, folder, tmp_path):
    (folder / "disk").rename(tmp_path / "disk")
    (folder / "disk").symlink_to(tmp_path / "disk")
    base.add(folder)
    (tmp_path / "disk").rename(tmp_path / "away")
    assert len(base.add(folder).kept) == 2
    assert len(base.documents()) == 3


def test_a_folder_that_is_followed_keeps_its_documents_too(base, folder):
    base.add(folder)
    for name in ("disk/a.txt", "disk/deep/b.txt"):
        (folder / name).unlink()
    assert len(next(base.follow(folder)).kept) == 2
    assert len(next(base.follow(folder, allow_empty=True)).removed) == 2


def test_a_moved_file_leaves_its_old_place_also_once_it_has_changed(base, folder, tmp_path):
    base.add(folder)
    moved = tmp_path / "moved"
    folder.rename(moved)
    report = base.add(moved / "disk")
    assert report.removed == (f"{folder}/disk/a.txt", f"{folder}/disk/deep/b.txt")
    assert report.copies == ()
    (moved / "disk" / "a.txt").write_text(text(7))
    base.add(moved)
    assert sources(base) == [f"{moved}/disk/a.txt", f"{moved}/disk/deep/b.txt", f"{moved}/here.txt"]
    assert text(1).split(".")[0] not in "".join(source.text for source in base.passages("river", top_k=20))


def test_an_old_place_that_is_still_listed_goes_when_the_moved_file_changes(base, folder, tmp_path):
    copied = tmp_path / "copied.txt"
    copied.write_text(text(1))
    base.add(folder, copied)
    (folder / "disk" / "a.txt").unlink()
    copied.write_text(text(7))
    assert base.add(copied).removed == (f"{folder}/disk/a.txt",)


def test_a_copy_of_an_attachment_is_no_move(base, tmp_path):
    message = files.mail()
    message.add_attachment(text(1), filename="one.txt")
    (tmp_path / "m.eml").write_bytes(bytes(message))
    base.add(tmp_path / "m.eml")
    (tmp_path / "one.txt").write_bytes(message.get_payload(1).get_payload(decode=True))
    report = base.add(tmp_path / "one.txt")
    assert (report.removed, len(report.copies)) == ((), 1)
    (tmp_path / "m.eml").rename(tmp_path / "n.eml")
    assert base.add(tmp_path / "n.eml").removed == (f"{tmp_path}/m.eml", f"{tmp_path}/m.eml/one.txt")
