"""A power cut in the middle of a change of the index: what the catalogue relies on stays."""

import os
import time

import numpy as np
import pytest

from kvweave.errors import StoreError
from kvweave.files import hold_lock
from kvweave.index import durable
from kvweave.index.documents import document_version
from kvweave.index.vector_index import GRACE_S, VectorIndex
from kvweave.types import Chunk

DIMENSIONS = 4
VERSIONS = [document_version(source, "1") for source in "ab"]


def chunk(source):
    text = f"The river of {source}."
    return Chunk(text, (1, 2), source * 32, source, "1", 0, len(text))


def vectors(count=1):
    return np.tile(np.array([[1, 0, 0, 0]], dtype=np.float32), (count, 1))


def manifests(folder):
    return sorted((folder / "chunks.lance" / "_versions").glob("*.manifest"))  # newest first


@pytest.fixture
def torn(tmp_path):
    """An index with document a, whose latest change has kept its name and lost its bytes."""
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a")], vectors())
    synced = len(manifests(tmp_path))
    index.delete([VERSIONS[0]], before_s=2.0**40)
    assert len(manifests(tmp_path)) == synced + 1
    manifests(tmp_path)[0].write_bytes(b"")
    return tmp_path


def test_once_the_machine_has_started_again_the_last_synced_version_is_used(torn, monkeypatch):
    monkeypatch.setattr("kvweave.machine.boot_id", lambda: "another run")
    index = VectorIndex(torn, DIMENSIONS)
    assert index.rows_by_version() == {VERSIONS[0]: 1}
    index.add([chunk("b")], vectors())
    assert VectorIndex(torn, DIMENSIONS).rows_by_version() == {VERSIONS[0]: 1, VERSIONS[1]: 1}
    monkeypatch.setattr("kvweave.machine.boot_id", lambda: "a third run")
    assert VectorIndex(torn, DIMENSIONS).rows_by_version() == {VERSIONS[0]: 1, VERSIONS[1]: 1}


def test_in_the_same_run_of_the_machine_no_version_is_dropped(torn):
    with pytest.raises(StoreError, match="cannot be opened"):
        VectorIndex(torn, DIMENSIONS)


def test_a_version_that_another_process_has_synced_stays(tmp_path, monkeypatch):
    first, second = VectorIndex(tmp_path, DIMENSIONS), VectorIndex(tmp_path, DIMENSIONS)
    first.add([chunk("a")], vectors())
    second.add([chunk("b")], vectors())
    monkeypatch.setattr("kvweave.machine.boot_id", lambda: "another run")
    assert VectorIndex(tmp_path, DIMENSIONS).rows_by_version() == {VERSIONS[0]: 1, VERSIONS[1]: 1}


def test_temporary_files_that_killed_writers_have_left_are_deleted_after_an_hour(tmp_path):
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a")], vectors())
    data = tmp_path / "chunks.lance" / "data"
    left = [data / ".tmpAb12Cd", tmp_path / "synced.tmp-4194304999-abcdef01"]
    young = data / ".tmpEf34Gh"
    for path in (*left, young):
        path.write_text("removed text")
    for path in left:
        os.utime(path, (time.time() - 2 * GRACE_S,) * 2)
    index.sweep({VERSIONS[0]})
    assert [path for path in (*left, young) if path.exists()] == [young]
    assert index.rows_by_version() == {VERSIONS[0]: 1}


def test_a_new_index_that_has_lost_its_word_index_gets_another(tmp_path):
    VectorIndex(tmp_path, DIMENSIONS)
    (tmp_path / "synced").unlink()
    for path in (tmp_path / "chunks.lance" / "_indices").rglob("*.lance"):
        path.unlink()
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a")], vectors())
    assert len(index.search("river", vectors()[0], 1, VERSIONS)) == 1


def test_a_new_index_goes_back_to_its_beginning(tmp_path, monkeypatch):
    VectorIndex(tmp_path, DIMENSIONS)
    index = VectorIndex(tmp_path, DIMENSIONS)
    monkeypatch.setattr("kvweave.index.durable.Durability.sync", lambda self, version: None)
    index.add([chunk("a")], vectors())
    monkeypatch.undo()
    for data in (tmp_path / "chunks.lance" / "data").iterdir():
        data.write_bytes(b"")
    monkeypatch.setattr("kvweave.machine.boot_id", lambda: "another run")
    again = VectorIndex(tmp_path, DIMENSIONS)
    assert again.rows_by_version() == {}
    again.add([chunk("a")], vectors())
    assert again.rows_by_version() == {VERSIONS[0]: 1}


def lose_bytes_once(folder, monkeypatch):
    """Let LanceDB's next file lose its end before it is synced."""
    real = durable.sync_tree

    def loses_bytes(synced_folder, synced):
        newest = max((folder / "chunks.lance" / "data").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, 100)
        monkeypatch.setattr(durable, "sync_tree", real)
        return real(synced_folder, synced)

    monkeypatch.setattr(durable, "sync_tree", loses_bytes)


def test_while_others_write_no_version_is_dropped(tmp_path, monkeypatch):
    """What they write is built on the newest version: theirs would name a file that is gone."""
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a")], vectors())
    lose_bytes_once(tmp_path, monkeypatch)
    whole = manifests(tmp_path)
    with hold_lock(tmp_path / "writers.lock", shared=True), pytest.raises(StoreError):
        index.add([chunk("b")], vectors())
    assert len(manifests(tmp_path)) > len(whole)
    with pytest.raises(StoreError):
        index.add([chunk("c")], vectors())
    assert manifests(tmp_path) == whole
    index.add([chunk("b")], vectors())
    assert VectorIndex(tmp_path, DIMENSIONS).rows_by_version() == {VERSIONS[0]: 1, VERSIONS[1]: 1}


def test_a_version_of_which_lancedb_has_lost_bytes_without_an_error_is_dropped(tmp_path, monkeypatch):
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a")], vectors())
    lose_bytes_once(tmp_path, monkeypatch)
    with pytest.raises(StoreError, match="not written whole"):
        index.add([chunk("b")], vectors())
    assert index.rows_by_version() == {VERSIONS[0]: 1}
    index.add([chunk("b")], vectors())
    for each in (index, VectorIndex(tmp_path, DIMENSIONS)):
        assert each.rows_by_version() == {VERSIONS[0]: 1, VERSIONS[1]: 1}
        assert len(each.search("river", vectors()[0], 2, VERSIONS)) == 2


def test_what_was_removed_while_the_clock_was_ahead_goes_once_it_is_right(tmp_path, monkeypatch):
    index = VectorIndex(tmp_path, DIMENSIONS)
    index.add([chunk("a"), chunk("b")], vectors(2))
    right = time.time() - 86_400
    monkeypatch.setattr("kvweave.index.vector_index.time.time", lambda: right)
    index.delete([VERSIONS[0]], before_s=right)
    index.sweep({VERSIONS[1]}, grace_s=30 * 86_400)
    assert index.rows_by_version() == {VERSIONS[1]: 1}
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"river of a" in path.read_bytes()]
    assert kept == []
