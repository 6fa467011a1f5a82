"""What users name: knowledge bases, conversations, files and folders."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvweave.config import Config
from kvweave.errors import InvalidRequest, PathNotFound

_USABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USABLE = "letters, digits, '.', '_' and '-', 100 at most, a letter or digit first"


def usable(kind: Literal["knowledge base", "conversation"], name: str) -> str:
    """The name, if a folder can have it; raises InvalidRequest."""
    if not _USABLE_NAME.fullmatch(name):
        raise InvalidRequest(f"{kind} name {name!r} is not usable: {_USABLE}")
    return name


def kb_folder(name: str, config: Config) -> Path:
    """Where a knowledge base is kept; raises InvalidRequest for an unusable name."""
    return config.home / "kb" / usable("knowledge base", name)


def place(path: str | Path) -> Path:
    """A path that a user named, absolute; an empty one would mean the working folder, which nobody means.

    Raises InvalidRequest for that.
    """
    if not str(path):
        raise InvalidRequest("a path is empty; name a file or folder ('.' for this one)")
    return Path(path).expanduser().absolute()


def existing(paths: Sequence[str | Path]) -> list[Path]:
    """The same of paths to add; raises PathNotFound for one that does not exist, InvalidRequest if there are none."""
    if not paths:
        raise InvalidRequest("no paths to add")
    places = [place(path) for path in paths]
    for each in places:
        if not each.exists():
            raise PathNotFound(f"{each} does not exist")
    return places
