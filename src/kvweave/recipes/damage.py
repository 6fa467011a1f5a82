"""What to do when stored KV turns out damaged while it is used: begin again, without it.

KV is verified layer by layer when it is asked for, which may be in the middle of a pass. By then the store has dropped
the entry, so whoever looks it up again finds the next best or nothing, and computes. The same holds for KV that does not
come to its end, since the server that it comes from has died: which is no damage, and is not found again layer by layer.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvweave.core import ChunkKV
from kvweave.errors import DamagedEntry
from kvweave.store.format import verify_content

_LOG = logging.getLogger(__name__)

Made = TypeVar("Made")


def despite_damage(step: Callable[[], Made]) -> Made:
    """What `step` returns, taken from its beginning again as often as an entry that it uses turns out damaged.

    The step looks up everything that it uses, and what it has done before it fails need not be undone. This ends: no
    damaged entry is found twice, and none that broke off is found again but whole.
    """
    while True:
        try:
            return step()
        except DamagedEntry as error:
            _LOG.warning("starting anew without an entry that cannot be used: %s", error)


def verify_all(used: Iterable[ChunkKV | None]) -> None:
    """Check all that a step is going to use, where it could not begin again; raises DamagedEntry."""
    for kv in used:
        if kv is not None:
            verify_content(kv)


@contextmanager
def damage_found_at_once(used: Iterable[ChunkKV | None]) -> Iterator[None]:
    """When one of the entries that a step uses turns out damaged, look for damage in all the others as well.

    Damage seldom comes alone: so the next attempt is the last one, not one of as many as there are damaged entries.
    """
    try:
        yield
    except DamagedEntry:
        for kv in used:
            with suppress(DamagedEntry):
                if kv is not None:
                    verify_content(kv)
        raise
