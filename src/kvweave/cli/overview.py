"""Prints the overview of `kvweave` without a command: the three main commands and the knowledge bases. Imports almost nothing."""

import sqlite3
from pathlib import Path
from urllib.parse import quote

from kvweave.home import default_home
from kvweave.version import __version__

_COMMANDS = (
    ("kvweave add FOLDER", "read documents and prepare them"),
    ("kvweave ask 'QUESTION'", "answer from them, with sources"),
    ("kvweave serve", "the same as a page and with OpenAI's API"),
)


def print_overview() -> None:
    """Print the main commands and the knowledge bases of the default home."""
    home = default_home().absolute()
    print(
        f"kvweave {__version__}: answers over your own documents that never compute the same thing twice.\n"
    )
    for command, what in _COMMANDS:
        print(f"  {command:<24}{what}")
    print()
    listed = [(path.parent.name, _counts(path)) for path in sorted(home.glob("kb/*/catalog.sqlite"))]
    if not listed:
        print(f"Nothing is in {home} yet. `kvweave demo` tries it on sample documents.")
    else:
        print(f"In {home}:")
        for name, counts in listed:
            print(f"  {name:<24}{counts}{'' if name == 'default' else f'  (--kb {name})'}")
    print("\n`kvweave --help` lists every command.")


def _counts(path: Path) -> str:
    """Return the number of documents and chunks of a knowledge base, read without locks and without model libraries."""
    try:
        documents, chunks = _read(path, "mode=ro")
    except sqlite3.Error:
        try:  # a read-only folder, where SQLite cannot create its shared memory
            documents, chunks = _read(path, "immutable=1")
        except sqlite3.Error as error:
            return f"cannot be read: {error}"
    return f"{documents} document{'' if documents == 1 else 's'}, {chunks} chunk{'' if chunks == 1 else 's'}"


def _read(path: Path, mode: str) -> tuple[int, int]:
    connection = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=1)
    try:
        ((documents, chunks),) = connection.execute(
            "SELECT count(*), coalesce(sum(chunks), 0) FROM documents"
        )
        return int(documents), int(chunks)
    finally:
        connection.close()
