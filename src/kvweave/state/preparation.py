"""How far the chunks of a knowledge base are prepared, and which process works on it. Loads no model.

The commit that lists a document marks that there is something to prepare; so does the commit that removes one, since KV of other
documents may have been computed after its chunks. The mark goes once everything that fits the store's limit is prepared, so work
that was interrupted is found again. The process that works holds the lock on `lock`.

The background process prepares everything marked, for any recipe. It also holds the lock on `background_lock`, from its start to its
end. That file has its id as soon as it is started, before it has loaded its code.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvweave.config import Config
from kvweave.database import Database, FactTable
from kvweave.errors import StoreError
from kvweave.files import absolute_if_path, is_locked, is_process_alive, try_lock

_LOG = logging.getLogger(__name__)
_SINCE: Final = "prepare_since"
_REMOVED: Final = "prepare_removed"
_LEFT: Final = "prepare_left"
_LEFT_WITHOUT_KV: Final = "prepare_left_without_kv"
_LEAST_LEFT_S: Final = "prepare_least_left_s"
_MOST_LEFT_S: Final = "prepare_most_left_s"
_MEASURED: Final = "prepare_left_measured"
_LOCK_TRIES, _LOCK_TRY_S = (
    5,
    0.02,
)  # a command that looks whether a process works holds the lock for an instant
_STARTING: Final = "starting"
_START_S: Final = 120.0
"""A process that has not locked its file by then has failed to start."""


@dataclass(frozen=True, slots=True)
class PreparationStatus:
    """How far the chunks are prepared.

    Attributes:
        chunks: chunks of all documents.
        left: chunks for which a vector, KV or something beside it is still to be computed, as far as it fits the store's limit.
        left_without_kv: those of them that have no KV yet; a question computes them.
        least_left_s, most_left_s: about how many seconds the rest takes, from what the process at work has measured; None before
            it has measured all kinds of work, and without such a process.
        process: the id of the process that prepares chunks now, or that was started to do so; None without one.
        left_without_vector: chunks that have no vector yet; a question finds them by their words alone.
    """

    chunks: int
    left: int
    left_without_kv: int
    least_left_s: float | None
    most_left_s: float | None
    process: int | None
    left_without_vector: int = 0


def preparation_key(config: Config) -> str:
    """Return the settings that decide how chunks are prepared, as one string."""
    auxiliary = absolute_if_path(config.model.auxiliary)  # the same in any folder
    return f"{config.recipe} {config.prepare} {config.store.storage} {auxiliary}"


def settings_of(key: str) -> dict[str, Any]:
    """Parse a string written by `preparation_key`."""
    names = ("recipe", "prepare", "storage", "auxiliary")
    values = key.split(" ", len(names) - 1)
    return {name: None if value == "None" else value for name, value in zip(names, values, strict=True)}


class Preparation:
    """What is recorded about the preparation of a knowledge base's chunks, in its `database` and its folder.

    Marks and remaining work are recorded for each set of preparation settings; `key` names those of this configuration.

    Attributes:
        key: see `preparation_key`.
        lock: the file that the process at work has locked.
        background_lock: the file that the background process has locked.
        log: what it writes.
    """

    def __init__(self, database: Database, facts: FactTable, folder: Path, key: str) -> None:
        self._database, self._facts, self.key = database, facts, key
        self.lock, self.log = folder / "prepare.lock", folder / "prepare.log"
        self.background_lock = folder / "prepare.background.lock"

    # The mark

    @property
    def since_s(self) -> float:
        """Time at which the oldest document that still needs preparation was added (seconds since 1970); 0 without one."""
        return self._facts.get(f"{_SINCE} {self.key}") or 0.0

    def marked(self) -> list[str]:
        """Return the preparation settings for which chunks still need work."""
        return [key for key, since_s in self._facts.about(_SINCE).items() if since_s]

    def mark(self) -> None:
        """Note that there is something to prepare from now on, in the caller's transaction if there is one."""
        with self._database.transaction():
            if not self.since_s:
                self._record(_SINCE, time.time())

    def mark_removed(self) -> None:
        """Note that a document was removed: a process at work looks once more. Without documents there is nothing to prepare."""
        with self._database.transaction():
            self._facts.record(_REMOVED, time.time())
            if self._database.query("SELECT 1 FROM documents LIMIT 1"):
                self.mark()
            else:
                self.clear()

    def changed_s(self) -> float:
        """Return when a document was last added or removed (seconds since 1970); 0 if never."""
        added_s = float(self._database.query("SELECT coalesce(max(added_at), 0) FROM documents")[0][0])
        return max(added_s, self._facts.get(_REMOVED) or 0.0)

    def unmark(self, changed_s: float) -> bool:
        """Note that all is prepared; return False, and do nothing, if the documents have changed since `changed_s`.

        Raises StoreError if that cannot be recorded, as on a full disk.
        """
        with self._database.transaction():
            if self.changed_s() > changed_s:
                return False
            self._record_left(0, 0, (0.0, 0.0))
            self._record(_SINCE, 0.0)
        return True

    def clear(self) -> None:
        """Delete all marks and records of remaining work: no documents are left."""
        for about in (_SINCE, _LEFT, _LEFT_WITHOUT_KV, _LEAST_LEFT_S, _MOST_LEFT_S, _MEASURED):
            self._facts.forget(about)

    # Remaining work

    def status(self) -> PreparationStatus:
        """Return the recorded progress of preparation, over all marked settings."""
        chunks = int(self._database.query("SELECT coalesce(sum(chunks), 0) FROM documents")[0][0])
        without_vector = int(self._database.query("SELECT count(*) FROM chunks_without_vector")[0][0])
        left, without_kv = (
            min(chunks, int(max(self._facts.about(name).values(), default=0)))
            for name in (_LEFT, _LEFT_WITHOUT_KV)
        )
        left = max(left, without_vector)
        process = self.worker()
        process = self.background() if process is None else process
        # Vectors come first, so while some are missing, the process has not measured the work after them.
        measured = process is not None and not without_vector and all(self._facts.about(_MEASURED).values())
        least_s, most_s = (
            sum(self._facts.about(name).values()) if measured or not left else None
            for name in (_LEAST_LEFT_S, _MOST_LEFT_S)
        )
        return PreparationStatus(chunks, left, without_kv, least_s, most_s, process, without_vector)

    def record_left(self, chunks: int, without_kv: int, seconds: tuple[float, float] | None) -> None:
        """Record the remaining work, with the least and the most seconds for it; see PreparationStatus."""
        with _if_possible(), self._database.transaction():
            self._record_left(chunks, without_kv, seconds)

    def chunks_with_kv(self) -> dict[str, int]:
        """Return how many chunks of each document have prepared KV, by source; documents without any are left out."""
        if not self._database.query("SELECT 1 FROM sqlite_master WHERE name = 'entries'"):
            return {}
        rows = self._database.query(
            """SELECT source, count(*) FROM document_chunks WHERE EXISTS
               (SELECT 1 FROM entries WHERE token_digest = kv_digest AND content = 'kv' AND kind NOT LIKE 'observed%')
               GROUP BY source"""
        )
        return dict(rows)

    def _record_left(self, chunks: int, without_kv: int, seconds: tuple[float, float] | None) -> None:
        least_s, most_s = seconds or (0.0, 0.0)
        self._record(_LEFT, chunks)
        self._record(_LEFT_WITHOUT_KV, without_kv)
        self._record(_LEAST_LEFT_S, least_s)
        self._record(_MOST_LEFT_S, most_s)
        self._record(_MEASURED, seconds is not None)

    def _record(self, about: str, value: float) -> None:
        self._facts.record(f"{about} {self.key}", value)

    # The process that works

    def worker(self) -> int | None:
        """Return the id of the process that prepares chunks now: None without one, 0 if it has not recorded its id."""
        return self._worker()[0]

    def is_left_to_worker(self) -> bool:
        """Whether a process works on it now, and prepares chunks as these settings do."""
        process, key = self._worker()
        return process is not None and key == self.key

    def _worker(self) -> tuple[int | None, str]:
        if not is_locked(self.lock):
            return None, ""
        with suppress(OSError, ValueError):
            process, _, key = self.lock.read_text().partition(" ")
            return int(process), key
        return 0, ""

    def background(self) -> int | None:
        """Return the id of the background process: None without one, 0 if it has not recorded its id."""
        with suppress(OSError, ValueError):
            words = self.background_lock.read_text().split()
            if is_locked(self.background_lock):
                return int(words[-1]) if words else 0
            began_s = self.background_lock.stat().st_mtime
            starts = words[:1] == [_STARTING] and time.time() < began_s + _START_S
            return int(words[1]) if starts and is_process_alive(int(words[1])) else None
        return None

    def note_start(self, process: int) -> None:
        """Note that a background process was started; without effect if it has its lock by now."""
        with suppress(OSError), try_lock(self.background_lock) as free:
            if free:
                self.background_lock.write_text(f"{_STARTING} {process}")

    def in_background(self) -> AbstractContextManager[bool]:
        """Be the only background process until the context ends; yield False at once if there is another."""
        return _alone(self.background_lock, str(os.getpid()))

    def working(self) -> AbstractContextManager[bool]:
        """Be the only process at work until the context ends; yield False at once if another one is."""
        return _alone(self.lock, f"{os.getpid()} {self.key}")


@contextmanager
def _alone(lock: Path, text: str) -> Iterator[bool]:
    """Hold a lock whose file says who does; yield False at once if another process holds it."""
    with ExitStack() as held:
        alone = False
        for _ in range(_LOCK_TRIES):
            try:
                alone = held.enter_context(try_lock(lock))
            except OSError as error:  # a file system without locks: others may work too
                _LOG.debug("%s cannot be locked: %s", lock, error)
                alone = True
            if alone:
                break
            held.pop_all().close()
            time.sleep(_LOCK_TRY_S)
        if alone:
            with suppress(OSError):  # a full disk
                lock.write_text(text)
        yield alone


@contextmanager
def _if_possible() -> Iterator[None]:
    """Skip a record that cannot be written, as on a full disk: only the displayed progress is wrong then."""
    try:
        yield
    except StoreError as error:
        _LOG.debug("not recorded: %s", error)
