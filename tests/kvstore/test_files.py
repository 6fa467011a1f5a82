"""A failed write leaves no partial file."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.files import write_atomically


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def parts_that_end_early() -> Iterator[bytes]:
    yield b"new"
    raise KeyboardInterrupt


def test_an_older_file_survives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    write_atomically(path, [b"old"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, [b"new"])
    assert path.read_bytes() == b"old"
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, parts_that_end_early())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_renamed_into_place_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may write the same name, and one of them may have listed it already."""
    path = tmp_path / "entry"
    monkeypatch.setattr("kvweave.files.sync_folder", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, [b"whole"])
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
