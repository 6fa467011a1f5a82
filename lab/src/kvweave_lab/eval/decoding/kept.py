"""Results on disk, one file each, so that an interrupted evaluation goes on where it stopped.

A file is there whole or not at all. Knows nothing of what a result is but that it is made of plain values.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically

VERSION = 2
"""What results mean; raised with every change after which older ones would mislead."""


class KeptResults:
    """The results of one evaluation by name.

    Args:
        folder: made if it is not there; None keeps results in memory only.
        subject: what they are about; a folder that holds results of another subject is refused, so that no table
            mixes two of them.

    Raises:
        InvalidRequest: another subject's folder, or one that cannot be written to.
    """

    def __init__(self, folder: Path | None, subject: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else folder / "runs"
        self._held: dict[str, Any] = {}
        if self._folder is None:
            return
        about = {"kept": VERSION, "kvweave version": kvweave.__version__, **subject}
        mine, theirs = json.loads(json.dumps(about)), self._read(self._folder / "about.json")
        if theirs is None:
            self._write("about.json", about)
            return
        changed = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        if changed:
            raise InvalidRequest(
                f"{folder} holds results that differ in {', '.join(changed)}; name another --output"
            )

    def get(self, name: str) -> Any | None:
        """A result that is there already, as plain values; raises InvalidRequest for a file that is damaged."""
        if self._folder is not None and name not in self._held:
            found = self._read(self._folder / _file(name))
            if found is not None:
                self._held[name] = found["result"]
        return self._held.get(name)

    def put(self, name: str, result: Any) -> None:
        """Keep a result; it is on the disk when this returns."""
        self._held[name] = result
        if self._folder is not None:
            self._write(_file(name), {"name": name, "result": result})

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"{path} cannot be read ({error}); delete it and run again, or name another --output"
            ) from error
        return dict(content)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        assert self._folder is not None
        try:
            write_atomically(self._folder / name, [json.dumps(content, ensure_ascii=False).encode()])
        except OSError as error:
            raise InvalidRequest(
                f"{self._folder} cannot be written to ({error.strerror}); name another --output"
            ) from error


def _file(name: str) -> str:
    return f"{xxhash.xxh3_64_hexdigest(name.encode())}.json"
