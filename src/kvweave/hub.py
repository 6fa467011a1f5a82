"""Models of the hub that are on the disk already: where their files are, and whether the hub answers.

Without an answer, the libraries that load a model wait for every file of it, with retries: over a minute, though all of them
are there. So kvweave asks the hub once, for a short time, and else takes what is on the disk.
"""

import logging
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOG = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long the hub may take to answer."""


def cached_folder(name: str) -> Path | None:
    """Return the folder with a model's files, without loading anything: a local one, or that of a hub id already fetched."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # not fetched yet, or no hub id; loading says so
        return Path(snapshot_download(name, local_files_only=True))
    return None


def folder_without_hub(hub_id: str) -> Path | None:
    """Return the folder of a model that is on the disk if the hub does not answer, and log that; else None."""
    folder = cached_folder(hub_id)
    if folder is None or not hub_is_silent():
        return None
    _LOG.warning("the model hub does not answer; using %s as it is on the disk", hub_id)
    return folder


@cache
def hub_is_silent() -> bool:
    """Whether the hub says nothing for `WAIT_S`; asked once in a process. False in offline mode, where no library waits for it."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # those of its HTTP client, which is another one in other versions
            get_session().head(constants.ENDPOINT, timeout=WAIT_S)
            answered.set()

    # In a thread: no timeout of an HTTP client covers looking up the host's address.
    asking = threading.Thread(target=ask, name="kvweave-hub", daemon=True)
    asking.start()
    asking.join(WAIT_S)
    return not answered.is_set()
