"""Watches folders, and brings the knowledge base up to date after each change."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave.extras import require
from kvweave.results import AddReport
from kvweave.state.knowledge_base_state import Progress, existing_paths, no_progress

_QUIET_MS: Final = 500
"""How long no file may change before a group of changes is added."""
_GROUP_MS: Final = 5000
"""How long changes are grouped at most, while files still change."""
_POLL_MS: Final = 500


Add = Callable[..., AddReport]
"""`KnowledgeBase.add`."""


def follow(
    add: Add,
    own: Path,
    folders: Sequence[str | Path],
    stop: threading.Event | None = None,
    progress: Progress = no_progress,
) -> Iterator[AddReport]:
    """Add the folders without computing chunk KV, then add changes until `stop` is set; yield each report.

    The watch starts before the folders are first read, so no change is missed. Changes below `own`, where knowledge bases are
    stored, are ignored. If a watched folder itself vanishes, its documents stay: its disk may have been unplugged.

    Raises:
        InvalidRequest: a path is a file.
        PathNotFound: a folder does not exist.
        MissingExtra: the extra `watch` is not installed.
    """
    require("watch", "following changes", "watchfiles")
    from watchfiles import watch

    roots = existing_paths(folders)
    for root in roots:
        if not root.is_dir():
            raise InvalidRequest(f"{root} is a file, and only folders are watched; name its folder")
    changes = watch(
        *roots,
        watch_filter=None,
        debounce=_GROUP_MS,
        step=_QUIET_MS,
        rust_timeout=_POLL_MS,
        yield_on_timeout=True,
        stop_event=stop,
        ignore_permission_denied=True,
    )
    for number, found in enumerate(changes):
        changed = {Path(path) for _, path in found}
        changed = {path for path in changed if not path.is_relative_to(own)}
        if not number:
            yield add(*roots, progress=progress, wait=False)
        elif changed:
            yield _bring_up_to_date(add, roots, changed, progress)


def _bring_up_to_date(add: Add, roots: Sequence[Path], changed: set[Path], progress: Progress) -> AddReport:
    there = [root for root in roots if root.is_dir()]
    if not there:
        return AddReport()
    # A folder that was moved here is reported as a change, the files in it are not.
    moved = {file for path in changed if path.is_dir() for file in path.rglob("*")}
    return add(*there, progress=progress, wait=False, only=changed | moved)
