"""Entries this process has lately read, with what it has verified of them, so that reading them again costs nothing.

Holds mappings of files, which the kernel may drop and read again from the disk when memory is short; the
bounds keep the address space and the number of mappings in check. Whether an entry still exists is not
known here: the catalogue is asked first, every time.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvweave.kvstore.format import Content

MAX_ENTRIES = 1024
MAX_BYTES = 4 * 2**30


class RecentEntries:
    """Least recently used first out; safe to use from several threads.

    An entry is held under its file's name, which is never given twice, so a replaced file is never mistaken
    for its successor. `max_entries` and `max_bytes` bound what is held.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, Content] = OrderedDict()
        self._bytes = 0
        self._guard = threading.Lock()

    def get(self, name: str) -> Content | None:
        """The content of this file, or None."""
        with self._guard:
            content = self._held.get(name)
            if content is not None:
                self._held.move_to_end(name)
            return content

    def put(self, name: str, content: Content) -> None:
        """Hold an entry that was just read, letting go of the longest unused ones beyond the bounds."""
        with self._guard:
            self._forget(name)
            self._held[name] = content
            self._bytes += content.bytes
            while self._held and (len(self._held) > self.max_entries or self._bytes > self.max_bytes):
                self._forget(next(iter(self._held)))

    def drop(self, names: Iterable[str]) -> None:
        """Let go of these files' entries; tensors already handed out stay valid."""
        with self._guard:
            for name in names:
                self._forget(name)

    def clear(self) -> None:
        """Let go of everything."""
        with self._guard:
            self._held.clear()
            self._bytes = 0

    def _forget(self, name: str) -> None:
        content = self._held.pop(name, None)
        if content is not None:
            self._bytes -= content.bytes
