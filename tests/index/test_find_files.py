"""Which files are found under some paths."""

import os
import socket
from pathlib import Path

import pytest

from kvweave.documents.files import find_files
from kvweave.errors import PathNotFound


def touched(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")


def names(folder: Path, files: list[Path]) -> list[str]:
    return [str(path.relative_to(folder)) for path in files]


def test_a_folder_is_walked_in_the_order_of_names(tmp_path: Path) -> None:
    touched(tmp_path, "b.txt", "a/z.md", "a/b/c.py", "README", "c.html.gz")
    files, skipped = find_files([tmp_path])
    assert names(tmp_path, files) == ["README", "a/b/c.py", "a/z.md", "b.txt", "c.html.gz"]
    assert skipped == []


def test_tools_folders_are_skipped(tmp_path: Path) -> None:
    touched(
        tmp_path,
        ".git/config",
        ".hidden",
        "node_modules/a.js",
        "__pycache__/x.py",
        "my/pyvenv.cfg",
        "my/lib.py",
        "k.py",
    )
    assert names(tmp_path, find_files([tmp_path])[0]) == ["k.py"]


def test_a_hidden_file_is_found_if_named(tmp_path: Path) -> None:
    touched(tmp_path, ".notes", ".folder/a.txt")
    files, _ = find_files([tmp_path / ".notes", tmp_path / ".folder"])
    assert names(tmp_path, files) == [".notes", ".folder/a.txt"]


def test_kinds_without_text_are_reported(tmp_path: Path) -> None:
    touched(tmp_path, "a.PNG", "b.tar.gz", "c.doc", "d.txt")
    files, skipped = find_files([tmp_path])
    assert names(tmp_path, files) == ["d.txt"]
    assert [(s.path.name, s.reason) for s in skipped] == [
        ("a.PNG", "an image (.png)"),
        ("b.tar.gz", "an archive (.tar)"),
        ("c.doc", "an old office file; save it as .docx, .xlsx or .pptx (.doc)"),
    ]
    assert find_files([tmp_path / "a.PNG"])[1] == skipped[:1]


def test_a_missing_path_raises_before_anything_is_read(tmp_path: Path) -> None:
    touched(tmp_path, "a.txt")
    with pytest.raises(PathNotFound, match=r"nothing\.txt"):
        find_files([tmp_path / "a.txt", tmp_path / "nothing.txt"])


def test_each_file_is_found_once_and_loops_end(tmp_path: Path) -> None:
    touched(tmp_path, "d/a.txt")
    (tmp_path / "d/loop").symlink_to(tmp_path / "d")
    (tmp_path / "d/twice.txt").symlink_to("a.txt")
    files, skipped = find_files([tmp_path, tmp_path / "d", tmp_path / "d/a.txt"])
    assert names(tmp_path, files) == ["d/a.txt"]
    assert skipped == []


def test_links_to_nothing_and_pipes_are_reported(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "pipe2.txt").symlink_to("pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))  # a short path: its length is limited
        files, skipped = find_files([tmp_path, tmp_path / "pipe.txt", "/dev/zero"])
    assert files == []
    assert [s.reason for s in skipped] == ["a link to nothing", "a named pipe", "a socket", "a device"]


def test_names_that_are_not_utf8_are_reported_in_a_form_that_can_be_printed(tmp_path: Path) -> None:
    touched(tmp_path, "good.txt", os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"d\xe9/inside.txt"))
    (tmp_path / "link.txt").symlink_to(os.fsdecode(b"caf\xe9.txt"))
    named = tmp_path / os.fsdecode(b"caf\xe9.txt")
    files, skipped = find_files([tmp_path, named])
    assert names(tmp_path, files) == ["good.txt", "link.txt"]
    assert [(str(s.path.relative_to(tmp_path)), s.reason) for s in skipped] == [
        ("caf\\udce9.txt", "its name is not UTF-8; rename it"),
        ("d\\udce9", "its name is not UTF-8; rename it"),
    ]
    with pytest.raises(PathNotFound) as raised:
        find_files([tmp_path / "gone\udce9", tmp_path / "odd\ud800"])
    assert "gone\\udce9 does not exist" in str(raised.value)
    str(raised.value).encode()
    with pytest.raises(PathNotFound):
        find_files([tmp_path / "odd\ud800"])


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched(tmp_path, "a.txt", "locked/b.txt")
    listed = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    files, skipped = find_files([tmp_path])
    assert names(tmp_path, files) == ["a.txt"]
    assert [(s.path.name, s.reason) for s in skipped] == [
        ("locked", "cannot list the folder: Permission denied")
    ]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched(tmp_path, "sub/a.txt")
    monkeypatch.chdir(tmp_path / "sub")
    assert find_files(["../sub/a.txt"])[0] == [tmp_path / "sub/a.txt"]
