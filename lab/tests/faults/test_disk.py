"""What a kill and a power cut leave of a folder."""

from random import Random

import pytest

from kvweave_lab.faults.disk import Disk, Kind, Loss, Record


@pytest.fixture
def disk(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    return Disk(root)


def records(root, *calls):
    """Return records of calls like ("write", "name", b"data"); each name has an inode of its own."""
    found = []
    for kind, name, *more in calls:
        path = str(root / name) if name else str(root)
        data = more[0] if kind == Kind.WRITE else b""
        other = str(root / more[0]) if kind == Kind.RENAME else ""
        at = more[1] if len(more) > 1 else 0
        found.append(Record(kind, hash(name), at, path, other, data))
    return found


def left(disk, tmp_path, loss, seed=0):
    place = tmp_path / "left"
    disk.leave(place, loss, Random(seed))
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    }


def test_a_kill_takes_nothing_and_a_power_cut_what_was_not_synced(disk, tmp_path):
    root = tmp_path / "root"
    for each in records(root, (Kind.CREATE, "new"), (Kind.WRITE, "new", b"whole")):
        disk.apply(each)
    assert left(disk, tmp_path, Loss.NOTHING) == {"old": b"old", "new": b"whole"}
    assert left(disk, tmp_path, Loss.UNSYNCED) == {"old": b"old"}
    disk.apply(*records(root, (Kind.SYNC_FOLDER, "")))
    assert left(disk, tmp_path, Loss.UNSYNCED) == {"old": b"old", "new": b""}
    disk.apply(*records(root, (Kind.SYNC, "new")))
    for loss in Loss:
        assert left(disk, tmp_path, loss) == {"old": b"old", "new": b"whole"}


def test_a_rename_lasts_once_its_folder_is_synced(disk, tmp_path):
    root = tmp_path / "root"
    written = records(root, (Kind.CREATE, "new"), (Kind.WRITE, "new", b"whole"), (Kind.SYNC, "new"))
    for each in (*written, *records(root, (Kind.RENAME, "new", "old"))):
        disk.apply(each)
    assert left(disk, tmp_path, Loss.NOTHING) == {"old": b"whole"}
    assert left(disk, tmp_path, Loss.UNSYNCED) == {"old": b"old"}
    disk.apply(*records(root, (Kind.SYNC_FOLDER, "")))
    assert left(disk, tmp_path, Loss.UNSYNCED) == {"old": b"whole"}


def test_a_power_cut_may_keep_tear_or_drop_each_unsynced_write(disk, tmp_path):
    root = tmp_path / "root"
    block = bytes(range(1, 256)) * 8
    calls = (
        (Kind.CREATE, "a"),
        (Kind.SYNC_FOLDER, ""),
        (Kind.WRITE, "a", block),
        (Kind.WRITE, "a", b"end", len(block)),
    )
    for each in records(root, *calls):
        disk.apply(each)
    found = {left(disk, tmp_path, Loss.SOME, seed)["a"] for seed in range(200)}
    assert {b"", block, block + b"end", bytes(len(block)) + b"end"} <= found
    assert {content[:512] for content in found if len(content) == 512} == {block[:512]}


def test_a_write_that_was_not_recorded_is_found(disk, tmp_path):
    root = tmp_path / "root"
    assert disk.differences(root) == []
    (root / "unseen").write_bytes(b"x")
    (root / "old").write_bytes(b"changed")
    assert disk.differences(root) == ["old", "unseen"]
