"""The knowledge bases of one tenant in a server: each is opened once and shared by all threads."""

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvweave.config import Config
from kvweave.errors import Cancelled, InvalidRequest, KnowledgeBaseNotFound, KvweaveError, StoreBusy
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.machine import use_one_thread
from kvweave.state.knowledge_base_state import kb_folder
from kvweave.state.resident import ResidentModels

_LOG = logging.getLogger(__name__)
_DELETE_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class KBSummary:
    """A knowledge base in a list: documents, chunks, and the bytes of its chunk KV on disk."""

    name: str
    documents: int
    chunks: int
    bytes: int


@dataclass(slots=True)
class _Served:
    """An open knowledge base: how many requests use it, whether it is being deleted, and the thread of its idle work."""

    base: KnowledgeBase
    users: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    idle: threading.Thread | None = None


class ServedBases:
    """The knowledge bases under `config.home`; safe to use from many threads.

    Args:
        config: the tenant's settings.
        resident: the process's models.
        idle: do background work for open knowledge bases, each in a thread of its own.
        tenant: whose they are; None for those of the server's own home.
    """

    def __init__(
        self, config: Config, resident: ResidentModels, *, idle: bool = False, tenant: str | None = None
    ) -> None:
        self._config, self._resident, self._idle = config, resident, idle
        self._tenant = tenant
        self._open: dict[str, _Served] = {}
        self._changed = threading.Condition()
        self._gone = config.home / "deleted"
        shutil.rmtree(self._gone, ignore_errors=True)  # what a deletion left that was interrupted

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in (self._config.home / "kb").glob("*/catalog.sqlite"))

    def summaries(self) -> list[KBSummary]:
        """Return what each holds; one that cannot be read is logged and left out."""
        found = []
        for name in self.names():
            try:
                with self.using(name) as base:
                    documents = base.documents()
                    chunks = sum(document.chunks for document in documents)
                    found.append(KBSummary(name, len(documents), chunks, base.store.used_bytes))
            except KvweaveError as error:
                _LOG.warning("knowledge base %s is not listed: %s", name, error)
        return found

    def create(self, name: str) -> KnowledgeBase:
        """Create a knowledge base; raises InvalidRequest for an unusable name, and if there is one of this name."""
        with self._changed:
            if (kb_folder(name, self._config) / "catalog.sqlite").exists():
                raise InvalidRequest(f"there is a knowledge base {name!r} already; take another name")
            return self._opened(name).base

    def get(self, name: str) -> KnowledgeBase:
        """Return an open knowledge base; raises KnowledgeBaseNotFound if there is none of this name.

        Use it inside `using`, which keeps it from being closed meanwhile.
        """
        with self._changed:
            return self._existing(name).base

    @contextmanager
    def using(self, name: str) -> Iterator[KnowledgeBase]:
        """Give a knowledge base that is not closed while this lasts; raises as `get`."""
        with self._changed:
            served = self._existing(name)
            served.users += 1
        try:
            yield served.base
        finally:
            with self._changed:
                served.users -= 1
                self._changed.notify_all()

    def closing(self, name: str) -> Callable[[], bool]:
        """Return a function that says whether the knowledge base is being deleted, so that its requests end."""
        with self._changed:
            return self._existing(name).closing.is_set

    def delete(self, name: str) -> None:
        """Delete a knowledge base with all it stores; its running requests end first.

        Raises KnowledgeBaseNotFound, and StoreBusy if a request does not end.
        """
        with self._changed:
            served = self._existing(name)
            served.closing.set()
            ended = self._changed.wait_for(lambda: not served.users, _DELETE_WAIT_S)
            if not ended:
                served.closing.clear()
                raise StoreBusy(
                    f"knowledge base {name!r} is in use for over {_DELETE_WAIT_S:.0f} s; try again"
                )
        self._close(served)  # waits for its background work, and others need not
        with self._changed:
            self._open.pop(name, None)
            self._gone.mkdir(parents=True, exist_ok=True)
            moved = self._gone / uuid.uuid4().hex
            kb_folder(name, self._config).rename(moved)  # at once: no other process finds half of it
        shutil.rmtree(moved, ignore_errors=True)

    def stores(self) -> list[ChunkStore]:
        with self._changed:
            served = [each for each in self._open.values() if not each.closing.is_set()]
        return [each.base.store for each in served]

    def close(self) -> None:
        """Close all; their requests have to have ended."""
        with self._changed:
            for served in self._open.values():
                served.closing.set()
            for served in self._open.values():
                self._close(served)
            self._open.clear()

    def _existing(self, name: str) -> _Served:
        if not (kb_folder(name, self._config) / "catalog.sqlite").exists():
            raise KnowledgeBaseNotFound(f"there is no knowledge base {name!r}; create it first")
        return self._opened(name)

    def _opened(self, name: str) -> _Served:
        served = self._open.get(name)
        if served is None:
            # A shared tier knows no folders. Without one, `kvweave` finds the entries by the name alone.
            apart = self._tenant is not None and self._config.store.shared is not None
            namespace = f"{self._tenant}/{name}" if apart else None
            base = KnowledgeBase(name, self._config, self._resident, namespace)
            served = self._open[name] = _Served(base)
            if self._idle:
                served.idle = threading.Thread(
                    target=self._work, args=(served,), name=f"kvweave-idle-{name}", daemon=True
                )
                served.idle.start()
        elif served.closing.is_set():
            raise Cancelled(f"knowledge base {name!r} is being deleted")
        return served

    def _work(self, served: _Served) -> None:
        use_one_thread()
        try:
            served.base.watch_idle(served.closing)
        except Exception:
            _LOG.exception("background work of knowledge base %s has ended", served.base.name)

    @staticmethod
    def _close(served: _Served) -> None:
        if served.idle is not None:
            served.idle.join()
        served.base.close()
