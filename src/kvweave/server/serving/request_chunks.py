"""Prepares the documents of requests, so that later requests can reuse them in any order and beside other documents.

A request stores the KV of its documents for exactly the text before them. A background thread computes the KV that the recipe
needs of each chunk by itself; it yields to every request of the process.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvweave.embedding import TextEncoder
from kvweave.errors import KvweaveError
from kvweave.kvstore.kv_store import KVStore
from kvweave.machine import use_one_thread
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import Preempted
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.state.active_requests import BackgroundStopped, ProcessActivity, RequestGuard

_LOG = logging.getLogger(__name__)
_MOST_WAITING: Final = 1000
MOST_CHARACTERS: Final = 20_000_000
"""Limits on the requests that wait for preparation and on the characters of their documents. Above them, documents are not
prepared. Under load nothing is prepared, so waiting documents stay in memory for long.
"""


class _Waiting(NamedTuple):
    texts: tuple[str, ...]
    system: str
    think: bool
    recipe: Recipe

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


class RequestChunks:
    """Prepares chunks in a thread of its own. The first request starts the thread.

    Args:
        adapter: the model.
        encoder: finds similar chunks for recipes that prepare a chunk after other chunks.
        store: the store for the KV.
        activity: the running requests of the process.
        quiet_s: seconds without a request before the thread starts to work.
    """

    def __init__(
        self,
        adapter: Adapter,
        encoder: TextEncoder,
        store: KVStore,
        activity: ProcessActivity,
        quiet_s: float,
    ) -> None:
        self._adapter, self._encoder, self._store = adapter, encoder, store
        self._stop = threading.Event()
        self._guard = RequestGuard(activity, quiet_s, self._stop)
        self._waiting: queue.Queue[_Waiting | None] = queue.Queue(_MOST_WAITING)
        self._characters = 0
        self._starting, self._counting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, texts: Sequence[str], system: str, recipe: Recipe, *, think: bool) -> None:
        """Queue the chunks of these texts for preparation after a system instruction. Returns at once."""
        with self._starting:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="kvweave-chunks", daemon=True)
                self._thread.start()
        waiting = _Waiting(tuple(texts), system, think, recipe)
        with self._counting, suppress(queue.Full):
            if self._characters + waiting.characters <= MOST_CHARACTERS:
                self._waiting.put_nowait(waiting)
                self._characters += waiting.characters
                return
        _LOG.info("the documents of a request are not prepared: %d others wait", self._waiting.qsize())

    def close(self) -> None:
        """Stop the thread between two layers and wait for its end."""
        self._stop.set()
        if self._thread is not None:
            with suppress(queue.Full):  # a full queue wakes the thread by itself
                self._waiting.put_nowait(None)
            self._thread.join()

    def _run(self) -> None:
        use_one_thread()
        while not self._stop.is_set():
            waiting = self._waiting.get()
            try:
                if waiting is not None:
                    with self._counting:
                        self._characters -= waiting.characters
                    self.prepare(waiting)
            except BackgroundStopped:
                return
            except (KvweaveError, OSError) as error:
                _LOG.warning("the documents of a request are not prepared: %s", error)

    def prepare(self, waiting: _Waiting) -> None:
        """Prepare the chunks of one request."""
        template = self._adapter.template
        prefix = tuple(template.prefix_ids(waiting.system, think=waiting.think))
        corpus = ChunkList([waiting.texts], template.chunk_ids, self._encoder.encode)
        ctx = PrepareContext(self._adapter, self._store, prefix, corpus)
        chunks = [tuple(template.chunk_ids(text)) for text in waiting.texts]
        self._guard.wait_for_requests()
        while True:
            try:
                with self._adapter.low_priority(self._guard):
                    prepare_chunks(ctx, chunks, waiting.recipe)
                return
            except Preempted:
                continue  # start over: a pass was interrupted and cannot resume
