"""What was said in a conversation, stored after every turn; everything else can be computed from it.

Light to import: removing a document empties the conversations that have read it, and loads no model. Knows nothing of
the KV files in the same folder, which are worthless without this.
"""

import hashlib
import json
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest, StoreError
from kvweave.files import try_lock, write_atomically, writer_of

LOCK = "lock"
"""Locked by the process that has the conversation open. It stays when a folder is emptied: others may wait for it."""
_FILE = "said.json"


@dataclass(frozen=True, slots=True)
class ConversationState:
    """A conversation's `token_ids`, the digest of its model, its budget, and the `versions` of documents that it read.

    An emptied conversation keeps its versions, so that opening it can say why it starts over.
    """

    model: str
    kv_budget: float
    token_ids: tuple[int, ...]
    versions: frozenset[str]

    def outdated(self, visible: Set[str]) -> bool:
        """Return whether it has read a document that is no longer among the `visible` versions."""
        return not self.versions <= visible


def read_state(folder: Path) -> ConversationState | None:
    """Return the conversation of a folder, or None for a new one; raises InvalidRequest for any other file."""
    try:
        stored = json.loads((folder / _FILE).read_bytes())
        if stored.pop("digest", None) not in (None, _digest(stored)):  # earlier versions wrote none
            raise ValueError("its content does not fit its digest")
        return ConversationState(
            str(stored["model"]),
            float(stored["kv_budget"]),
            tuple(map(int, stored["token_ids"])),
            frozenset(map(str, stored["versions"])),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(
            f"{folder / _FILE} cannot be read ({error!r}); begin another conversation"
        ) from error


def write_state(folder: Path, state: ConversationState) -> None:
    """Replace the stored conversation; if that fails, the old one stays. Raises StoreError."""
    stored = {
        "model": state.model,
        "kv_budget": state.kv_budget,
        "token_ids": state.token_ids,
        "versions": sorted(state.versions),
    }
    try:
        write_atomically(folder / _FILE, [json.dumps({**stored, "digest": _digest(stored)}).encode()])
    except OSError as error:
        raise StoreError(
            f"the conversation cannot be written to {folder}: {error.strerror}; free some space"
        ) from error


def _digest(stored: dict[str, Any]) -> str:
    """Return a digest of what is stored, so that a flipped bit does not change what was said."""
    return hashlib.blake2b(json.dumps(stored).encode(), digest_size=16).hexdigest()


def sweep(folder: Path) -> None:
    """Delete the temporary files of killed writers, which hold what was said; the caller holds the lock, so no writer lives."""
    for path in folder.iterdir():
        if writer_of(path.name) is not None:
            path.unlink(missing_ok=True)


def empty(folder: Path) -> None:
    """Delete a conversation's files; the caller holds its lock. Raises StoreError."""
    try:
        for path in folder.iterdir():
            if path.name != LOCK:
                path.unlink()
    except OSError as error:
        raise StoreError(
            f"{folder}, a conversation, cannot be emptied: {error.strerror}; delete it"
        ) from error


def empty_outdated(conversations: Path, visible: Set[str]) -> None:
    """Empty the conversations under a folder that have read a version which is not visible any more.

    One that a process has open is skipped: it starts over by itself. Raises StoreError.
    """
    for folder in sorted(conversations.glob("*/")):
        with try_lock(folder / LOCK) as free:
            if not free:
                continue
            sweep(folder)
            try:
                state = read_state(folder)
            except InvalidRequest:  # unreadable: it can neither be checked nor resumed
                state = None
            if state is None:
                empty(folder)
            elif state.outdated(visible) and state.token_ids:
                empty(folder)
                write_state(folder, replace(state, token_ids=()))
