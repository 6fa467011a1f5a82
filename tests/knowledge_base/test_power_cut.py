"""What a power cut must not take is on the disk (fsync), names included, before it is relied upon; and what kills leave goes."""

import os

import pytest

from kvweave.errors import InvalidRequest, StoreError
from kvweave.state.knowledge_base_state import KnowledgeBaseState
from support.tiny_kb import open_tiny, text

DEAD = ".tmp-4194304999-abcdef01"  # no process has this number


class Synced:
    """The files that were synced, by inode and time of change, and the entries that each folder had when it was synced."""

    def __init__(self):
        self._files, self._entries = set(), {}

    def note(self, descriptor):
        path, found = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
        if os.path.isdir(path):
            self._entries[path] = {
                (name, os.lstat(os.path.join(path, name)).st_ino) for name in os.listdir(path)
            }
        else:
            self._files.add((found.st_ino, found.st_mtime_ns))

    def lacks(self, folder):
        """Return what a power cut could take of a folder."""
        files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
        found = [path for path in files if not self._has_content(path)]
        return found + [path for path in (folder, *folder.rglob("*")) if not self.has_name(path)]

    def has_name(self, path):
        return (path.name, path.stat().st_ino) in self._entries.get(str(path.parent), ())

    def _has_content(self, path):
        return (path.stat().st_ino, path.stat().st_mtime_ns) in self._files


@pytest.fixture
def synced(monkeypatch):
    found, fsync = Synced(), os.fsync

    def noted(descriptor):
        fsync(descriptor)
        found.note(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


@pytest.fixture
def note(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text(text(1))
    return path


def test_the_index_is_on_the_disk_before_the_document_is_listed(tiny, tmp_path, note, synced, monkeypatch):
    lacking, put = [], KnowledgeBaseState.put

    def observed(state, *args, **kwargs):
        lacking.extend(synced.lacks(tmp_path / "home" / "kb" / "notes" / "vectors"))
        put(state, *args, **kwargs)

    monkeypatch.setattr(KnowledgeBaseState, "put", observed)
    with open_tiny(tmp_path / "home") as base:
        base.add(note)
        assert lacking == []
        note.write_text(text(2))
        base.add(note)
        assert lacking == []
        assert synced.lacks(base.folder / "vectors") == []  # joined files, before those go that they replace
        for folder in (base.folder, base.folder / "kv", *(base.folder / "kv").glob("??")):
            assert synced.has_name(folder)
    assert synced.has_name(tmp_path / "home" / "kb")
    assert synced.has_name(tmp_path / "home")


def test_a_turn_is_on_the_disk_once_it_is_said(tiny, tmp_path, note, synced):
    with open_tiny(tmp_path / "home") as base:
        base.add(note)
        with base.conversation("c") as talk:
            "".join(base.send(talk, "Where is the river?"))
            "".join(base.send(talk, "And the north?"))
            said = base.folder / "conversations" / "c" / "said.json"
            assert synced.has_name(said)
            assert synced.has_name(said.parent)


def test_a_flipped_bit_does_not_change_what_was_said(tiny, tmp_path, note):
    with open_tiny(tmp_path / "home") as base:
        base.add(note)
        with base.conversation("c") as talk:
            "".join(base.send(talk, "Where is the river?"))
            said = list(talk.token_ids)
        path = base.folder / "conversations" / "c" / "said.json"
        path.write_text(path.read_text().replace(f"[{said[0]}, {said[1]},", f"[{said[0]}, {said[1] ^ 1},"))
        with pytest.raises(InvalidRequest, match="begin another conversation"):
            base.conversation("c")


@pytest.mark.parametrize("opened", [True, False])
def test_what_a_killed_process_was_writing_of_a_conversation_is_deleted(tiny, tmp_path, note, opened):
    with open_tiny(tmp_path / "home") as base:
        base.add(note)
        base.conversation("c").close()
        left = base.folder / "conversations" / "c" / f"said.json{DEAD}"
        left.write_text("what was said")
        if opened:
            base.conversation("c").close()
        else:
            base.remove(note)
        assert not left.exists()


def test_an_index_that_was_torn_while_it_was_made_is_made_anew(tiny, tmp_path, note):
    torn = tmp_path / "home" / "kb" / "notes" / "vectors" / "chunks.lance"
    torn.mkdir(parents=True)
    (torn / "_versions").mkdir()
    (torn / "_versions" / "18446744073709551614.manifest").write_bytes(b"")
    with open_tiny(tmp_path / "home") as base:
        base.add(note)
        assert base.ask("Where is the river?").sources
        torn_again = base.folder / "vectors" / "chunks.lance" / "_versions"
    for manifest in torn_again.glob("*.manifest"):
        manifest.write_bytes(b"")
    with open_tiny(tmp_path / "home") as base, pytest.raises(StoreError, match="cannot be opened"):
        base.ask("What about the north?")
