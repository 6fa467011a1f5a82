"""What was said in a conversation, written down after every turn: all else can be computed again from it.

Light to import: taking a document out empties the conversations that have read it, and loads no model. Knows nothing
of KV; what else lies in a conversation's folder is worth nothing without this.
"""

import json
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from kvweave.errors import InvalidRequest, StoreError
from kvweave.files import alone, write_atomically

LOCK = "lock"
"""Held by whoever is having the conversation; it stays when a folder is emptied, since others may be waiting for it."""
_SAID, _NEXT = "said.json", "said.next"


@dataclass(frozen=True, slots=True)
class ConversationState:
    """A conversation's `token_ids`, the digest of its model, its budget, and the `versions` of documents that it read.

    Of one that was emptied the versions alone are left, so that whoever opens it can be told why it begins anew.
    """

    model: str
    kv_budget: float
    token_ids: tuple[int, ...]
    versions: frozenset[str]

    def outdated(self, visible: Set[str]) -> bool:
        """Whether it rests on a document that is not among the `visible` versions any more."""
        return not self.versions <= visible


def read_said(folder: Path) -> ConversationState | None:
    """What was said in the conversation of a folder, None for a new one; raises InvalidRequest for what is no such file."""
    try:
        told = json.loads((folder / _SAID).read_bytes())
        return ConversationState(
            str(told["model"]),
            float(told["kv_budget"]),
            tuple(map(int, told["token_ids"])),
            frozenset(map(str, told["versions"])),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(
            f"{folder / _SAID} cannot be read ({error!r}); begin another conversation"
        ) from error


def write_said(folder: Path, said: ConversationState) -> None:
    """Write it down in place of what was said before, which stays where this fails; raises StoreError."""
    told = {
        "model": said.model,
        "kv_budget": said.kv_budget,
        "token_ids": said.token_ids,
        "versions": sorted(said.versions),
    }
    try:
        write_atomically(folder / _NEXT, [json.dumps(told).encode()])
        (folder / _NEXT).replace(folder / _SAID)
    except OSError as error:
        raise StoreError(
            f"what was said cannot be written to {folder}: {error.strerror}; free some space"
        ) from error


def empty(folder: Path) -> None:
    """Delete all that a conversation keeps; its lock must be held. Raises StoreError."""
    try:
        for path in folder.iterdir():
            if path.name != LOCK:
                path.unlink()
    except OSError as error:
        raise StoreError(
            f"{folder}, a conversation, cannot be emptied: {error.strerror}; delete it"
        ) from error


def empty_outdated(conversations: Path, visible: Set[str]) -> None:
    """Empty those of the conversations under a folder that have read what is not visible any more.

    One that somebody is having is left: it begins anew by itself. Raises StoreError.
    """
    for folder in sorted(conversations.glob("*/")):
        with alone(folder / LOCK) as free:
            if free:
                _empty_outdated(folder, visible)


def _empty_outdated(folder: Path, visible: Set[str]) -> None:
    try:
        said = read_said(folder)
    except InvalidRequest:  # nobody can tell what it read, nor go on with it
        said = None
    if said is None:
        empty(folder)
    elif said.outdated(visible) and said.token_ids:
        empty(folder)
        write_said(folder, replace(said, token_ids=()))
