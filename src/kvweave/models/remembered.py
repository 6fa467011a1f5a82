"""What an earlier start found out about a model's files, so that the next start need not find it out again.

Digesting every weight and a large vocabulary takes seconds and always gives the same. A fact is used only while the folder's
files have the names, sizes, inodes and times that they had, and the libraries their versions.
"""

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kvweave.files import write_atomically

Fact = str | bool
_LIBRARIES: Final = ("torch", "transformers", "tokenizers")
_VERSION: Final = 1
"""Raise it when a fact means something else."""


class ModelMemory:
    """Facts about the model in one folder, in one file of the home folder.

    Forgetting is harmless: an unreadable file counts as empty, and a home that cannot be written to remembers nothing.

    Args:
        folder: the model's; None remembers nothing.
        home: the home folder.
    """

    def __init__(self, folder: Path | None, home: Path) -> None:
        self._folder = folder
        self._state = None if folder is None else _state(folder)
        name = hashlib.blake2b(str(folder).encode(), digest_size=16).hexdigest()
        self._file = home / "models" / "facts" / f"{name}.json"
        self._facts = self._read()

    def get(self, name: str) -> Fact | None:
        """Return a fact, None if it is not known."""
        return self._facts.get(name)

    def put(self, name: str, fact: Fact) -> None:
        """Remember a fact, unless the folder has changed since this object was made."""
        if self._folder is None or self._state is None or self._state != _state(self._folder):
            return
        self._facts = {**self._read(), **self._facts, name: fact}
        content = json.dumps({"state": self._state, "facts": self._facts})
        with suppress(OSError):
            write_atomically(self._file, [content.encode()])

    def _read(self) -> dict[str, Fact]:
        if self._state is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
            facts = dict(found["facts"]) if found["state"] == self._state else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {name: fact for name, fact in facts.items() if isinstance(fact, str | bool)}


def _state(folder: Path) -> str | None:
    """Name a folder's content by its files and the libraries; None if the model depends on more than its folder."""
    versions = [_VERSION, *(version(library) for library in _LIBRARIES)]
    if (folder / "adapter_config.json").exists():  # weights on top of a model that is elsewhere
        return None
    files = []
    try:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                seen = file.stat()
                times = (seen.st_mtime_ns, seen.st_ctime_ns)
                files.append([str(file.relative_to(folder)), seen.st_size, *times, seen.st_ino])
    except OSError:
        return None
    return hashlib.blake2b(json.dumps([versions, files]).encode(), digest_size=16).hexdigest()
