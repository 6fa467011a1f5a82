"""The knowledge bases of one tenant in a server. Each is opened once and shared by all threads."""

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvweave.config import Config
from kvweave.errors import Cancelled, InvalidRequest, KnowledgeBaseNotFound, KvweaveError, StoreBusy
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.machine import use_one_thread
from kvweave.state.knowledge_base_state import kb_folder
from kvweave.state.resident import ResidentModels

_LOG = logging.getLogger(__name__)
_DELETE_WAIT_S: Final = 30.0


@dataclass(slots=True)
class _Served:
    """An open knowledge base, the number of its running requests, whether it is being deleted, and its background thread."""

    base: KnowledgeBase
    users: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    idle: threading.Thread | None = None


class ServedBases:
    """The knowledge bases under `config.home`. Thread-safe.

    Args:
        config: the tenant's settings.
        resident: the process's models.
        idle: whether to do background work for each open knowledge base, in a thread of its own.
        tenant: name of the tenant; None for the server's own home.
    """

    def __init__(
        self, config: Config, resident: ResidentModels, *, idle: bool = False, tenant: str | None = None
    ) -> None:
        self._config, self._resident, self._idle = config, resident, idle
        self._tenant = tenant
        self._open: dict[str, _Served] = {}
        self._changed = threading.Condition()
        self._gone = config.home / "deleted"
        shutil.rmtree(self._gone, ignore_errors=True)  # the rest of an interrupted deletion

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in (self._config.home / "kb").glob("*/catalog.sqlite"))

    def summaries(self) -> list[dict[str, Any]]:
        """Return name, documents, chunks and bytes of chunk KV on disk of each knowledge base; log and leave out an unreadable one."""
        found = []
        for name in self.names():
            try:
                with self.using(name) as base:
                    documents = base.documents()
                    counts = {"documents": len(documents), "chunks": sum(each.chunks for each in documents)}
                    found.append({"name": name, **counts, "bytes": base.store.used_bytes})
            except KvweaveError as error:
                _LOG.warning("knowledge base %s is not listed: %s", name, error)
        return found

    def create(self, name: str) -> KnowledgeBase:
        """Create a knowledge base. Raises InvalidRequest for an unusable name or an existing knowledge base."""
        with self._changed:
            if (kb_folder(name, self._config) / "catalog.sqlite").exists():
                raise InvalidRequest(f"knowledge base {name!r} exists already; take another name")
            return self._opened(name).base

    def get(self, name: str) -> KnowledgeBase:
        """Return the knowledge base, opened. Raises KnowledgeBaseNotFound if it does not exist.

        It may be closed at any time; `using` keeps it open.
        """
        with self._changed:
            return self._existing(name).base

    @contextmanager
    def using(self, name: str) -> Iterator[KnowledgeBase]:
        """Yield the knowledge base and keep it open until the context ends. Raises as `get`."""
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
        """Return a function that returns whether the knowledge base is being deleted, so that its requests can end."""
        with self._changed:
            return self._existing(name).closing.is_set

    def delete(self, name: str) -> None:
        """End the requests to a knowledge base, then delete it with all its data.

        Raises KnowledgeBaseNotFound if it does not exist, and StoreBusy if a request does not end.
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
        self._close(served)  # without the lock: this waits for its background work
        with self._changed:
            self._open.pop(name, None)
            self._gone.mkdir(parents=True, exist_ok=True)
            moved = self._gone / uuid.uuid4().hex
            kb_folder(name, self._config).rename(moved)  # in one step: no other process finds it half deleted
        shutil.rmtree(moved, ignore_errors=True)

    def stores(self) -> list[ChunkStore]:
        with self._changed:
            served = [each for each in self._open.values() if not each.closing.is_set()]
        return [each.base.store for each in served]

    def close(self) -> None:
        """Close all knowledge bases. Their requests must have ended."""
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
            # A shared tier has no folder per tenant. Elsewhere the name alone is enough, and `kvweave` finds the entries by it.
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
