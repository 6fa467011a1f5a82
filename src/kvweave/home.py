"""Where everything is stored."""

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from kvweave.errors import InvalidRequest


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that KVWEAVE_HOME names, else the platform's data folder; raises InvalidRequest without either."""
    named = environment.get("KVWEAVE_HOME")
    try:
        folder = named or platformdirs.user_data_dir("kvweave", appauthor=False)
    except RuntimeError:
        raise _unknown("the platform's data folder") from None
    return without_tilde(folder)


def without_tilde(folder: str | Path) -> Path:
    """Return a folder with the user's home in place of `~`; raises InvalidRequest if that is not known."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise _unknown(str(folder)) from None


def _unknown(folder: str) -> InvalidRequest:
    """Return the error for a folder in the home of a user who has none: no HOME, and an id that the system does not know."""
    return InvalidRequest(
        f"{folder} is in the home folder of a user, which is not known here: HOME is not set, and the system has no such user; "
        "name a folder with --home or KVWEAVE_HOME"
    )
