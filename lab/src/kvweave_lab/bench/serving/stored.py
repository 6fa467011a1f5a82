"""Whether everything that a server stored is whole: `kvweave cache verify`, the request stores, and every SQLite file."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvweave.knowledge_base import open_existing
from kvweave.kvstore.chunk_store import ChunkStore

REQUESTS = "requests"
"""The folder, in a home, with the KV of documents that requests brought along."""


@dataclass(frozen=True, slots=True)
class StoredDamage:
    """What a check of a home found.

    Attributes:
        checked: entries that were read in full.
        problems: damaged entries and files, one line each.
    """

    checked: int
    problems: tuple[str, ...]


def verify_stored(home: Path) -> StoredDamage:
    """Check every knowledge base of a home, its store of requests, and every SQLite file. Changes what `verify` repairs.

    One knowledge base is checked by the command, the others by what the command calls, without its start.
    """
    checked, problems = 0, list(_database_problems(home))
    names = _knowledge_bases(home)
    for name in names[:1]:
        problems += _command_problems(home, name)
    for name in names:
        with open_existing(name, home=home) as base:
            report = base.store.verify()
        checked += report.checked
        if not report.sound:
            problems.append(f"knowledge base {name}: {report}")
    requests = home / REQUESTS
    if requests.is_dir():
        with ChunkStore(requests, namespace=REQUESTS) as store:
            report = store.verify()
        checked += report.checked
        if not report.sound:
            problems.append(f"the store of requests: {report}")
    return StoredDamage(checked, tuple(problems))


def _command_problems(home: Path, name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvweave", "cache", "verify", "--kb", name],
        env={**os.environ, "KVWEAVE_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    said = (done.stdout + done.stderr).strip()[-300:]
    return [f"`kvweave cache verify --kb {name}`: {said}"] if done.returncode else []


def _knowledge_bases(home: Path) -> list[str]:
    return sorted(path.parent.name for path in (home / "kb").glob("*/catalog.sqlite"))


def _database_problems(home: Path) -> Iterator[str]:
    """Yield what SQLite's own check finds, and files that are no databases any more."""
    for path in sorted(home.rglob("*.sqlite")):
        try:
            with closing(sqlite3.connect(path)) as database:
                (found,) = database.execute("PRAGMA integrity_check").fetchone()
        except sqlite3.Error as error:
            found = str(error)
        if found != "ok":
            yield f"{path.relative_to(home)}: {found}"
