"""Prepares the documents of requests, so that later requests can reuse them in any order and beside other documents.

A request stores the KV of its documents for exactly the text before them; elsewhere this KV is stale, but it can be used.
A background thread computes what the recipe prepares of each chunk. It begins with a chunk's second request, or with its first
while the server is idle. It yields to every request of the process.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvweave.embedding import TextEncoder, Vectors
from kvweave.errors import InvalidRequest, KvweaveError
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.machine import use_one_thread
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import Preempted
from kvweave.recipes.context import ChunkList, Ids, PrepareContext
from kvweave.recipes.offline import missing_bytes, preparation_cost, prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.remote.model import RemoteModel, as_engine
from kvweave.results import PreparedChunks
from kvweave.state.active_requests import BackgroundStopped, ProcessActivity, RequestGuard

_LOG = logging.getLogger(__name__)

MOST_CHARACTERS: Final = 20_000_000
"""Limit on the characters of the chunks that wait for preparation. The chunks that were asked for longest ago are dropped."""
MOST_VECTORS: Final = 10_000
"""How many embeddings of chunks are kept in memory, of 1.5 kB each with the default model."""
PAUSE_S: Final = 1.0
"""Seconds without a request after which chunks are prepared that two requests had."""
PATIENCE_S: Final = 1.0
"""What is prepared at once also goes on beside requests, for a fifth of the time, if they leave no pause for so long."""


@dataclass(frozen=True, slots=True)
class RequestDocuments:
    """The chunks of one request, in the order of its prompt, and what they are prepared for.

    Attributes:
        stored: for each chunk, whether the request found KV of it.
        prompt_tokens: the length of the prompt, in tokens.
    """

    texts: tuple[str, ...]
    system: str
    think: bool
    recipe: Recipe
    stored: tuple[bool, ...] = ()
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    """A chunk that is not prepared: the last request that had it, how many had it, and whether it is prepared at once."""

    text: str
    last: RequestDocuments
    requests: int = 0
    at_once: bool = False


class RequestChunks:
    """Prepares chunks in a thread of its own. The first request starts the thread.

    Args:
        adapter: the model.
        encoder: finds similar chunks for recipes that prepare a chunk after other chunks.
        store: the store for the KV.
        activity: the running requests of the process.
        quiet_s: seconds without a request before chunks are prepared that one request had; None prepares only those that
            two requests had.
    """

    def __init__(
        self,
        adapter: Adapter | RemoteModel,
        encoder: TextEncoder,
        store: ChunkStore,
        activity: ProcessActivity,
        quiet_s: float | None,
    ) -> None:
        self._adapter, self._encoder, self._store = adapter, encoder, store
        self._activity, self._quiet_s = activity, quiet_s
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[tuple[object, ...], _Waiting] = OrderedDict()
        self._characters = 0
        self._new: list[RequestDocuments] = []
        self._vectors: OrderedDict[str, Vectors] = OrderedDict()
        self._thread: threading.Thread | None = None

    def seen(self, documents: RequestDocuments) -> None:
        """Note the chunks of a request that was answered. Returns at once."""
        with self._changed:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="kvweave-chunks", daemon=True)
                self._thread.start()
            for text, stored in zip(documents.texts, documents.stored, strict=True):
                self._count(text, documents, stored)
            self._new.append(documents)
            self._changed.notify()

    def prepare(
        self, documents: RequestDocuments, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> PreparedChunks:
        """Prepare chunks now, yielding to requests between two layers, and return how many had to be computed.

        `progress` is called with the tokens that are done and their total.

        Raises InvalidRequest if the chunks take more room than the store has, and whatever `progress` does.
        """
        ctx, different = self._context(documents), list(dict.fromkeys(self._ids(documents.texts)))
        sizes = missing_bytes(ctx, _named(different), documents.recipe)
        if sum(sizes.values()) > self._store.limit_bytes:
            raise InvalidRequest(
                f"these {len(different)} chunks need {sum(sizes.values()):,} bytes, and the store may take "
                f"{self._store.limit_bytes:,}; raise the setting limit_bytes, or prepare fewer"
            )
        guard = RequestGuard(self._activity, 0.0, self._stop, PATIENCE_S)
        total, done = sum(map(len, different)), 0
        for number, ids in enumerate(different):
            progress(done, total)
            if number in sizes:
                self._compute(ctx, [ids], documents.recipe, guard)
            done += len(ids)
        progress(done, total)
        return PreparedChunks(len(different), len(sizes), total)

    def close(self) -> None:
        """Stop the thread between two layers and wait for its end."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # The thread

    def _run(self) -> None:
        use_one_thread()
        while not self._stop.is_set():
            with self._changed:
                new, self._new = self._new, []
            group: list[_Waiting] = []
            try:
                for documents in new:
                    self._choose(documents)
                if group := self._next():
                    self._prepare_group(group)
            except BackgroundStopped:
                return
            except (KvweaveError, OSError) as error:
                _LOG.warning("the documents of a request are not prepared: %s", error)
            with self._changed:
                self._forget(group)
                if not group and not self._new and not self._stop.is_set():
                    self._changed.wait(PAUSE_S if self._waiting else None)

    def _choose(self, documents: RequestDocuments) -> None:
        """Forget the chunks of a request that are prepared, and choose those that are prepared at once.

        These are chunks that two requests had, the most asked first, as long as preparing them costs less than half of
        what computing the prompt costs.
        """
        ctx, named = self._context(documents), _named(self._ids(documents.texts))
        missing = missing_bytes(ctx, named, documents.recipe)
        with self._changed:
            found = [self._waiting.get(_key(text, documents)) for text in documents.texts]
            self._forget([each for number, each in enumerate(found) if each and number not in missing])
        again = {
            number: each
            for number, each in enumerate(found)
            if each and number in missing and each.requests > 1
        }
        if not again:
            return
        chosen, cost = list[int](), preparation_cost(ctx, named, documents.recipe)
        for number in sorted(again, key=lambda number: -again[number].requests):
            if 2 * cost.of([*chosen, number]) <= documents.prompt_tokens:
                chosen.append(number)
                again[number].at_once = True

    def _next(self) -> list[_Waiting]:
        """Return the chunks to prepare now, all of one request: the most asked one, and those that it came with."""
        idle_s = -1.0 if self._activity.any_active else self._activity.idle_s
        with self._changed:
            ready = [each for each in self._waiting.values() if self._is_due(each, idle_s)]
        if not ready:
            return []
        first = max(ready, key=lambda each: (each.at_once, each.requests))
        return [each for each in ready if each.last is first.last and each.at_once == first.at_once]

    def _is_due(self, chunk: _Waiting, idle_s: float) -> bool:
        if chunk.at_once or (chunk.requests > 1 and idle_s >= PAUSE_S):
            return True
        return self._quiet_s is not None and idle_s >= self._quiet_s

    def _prepare_group(self, group: Sequence[_Waiting]) -> None:
        """Prepare chunks of one request as far as the store has room that no used KV takes."""
        documents = group[0].last
        ctx, chunks = self._context(documents), self._ids([each.text for each in group])
        room = self._store.limit_bytes - self._store.used_bytes + self._store.unused_bytes
        fitting = []
        for number, size in missing_bytes(ctx, _named(chunks), documents.recipe).items():
            if size <= room:
                room -= size
                fitting.append(chunks[number])
        if len(fitting) < len(group):
            _LOG.debug(
                "%d chunks of requests are not prepared: the store is full of KV that is in use",
                len(group) - len(fitting),
            )
        guard = RequestGuard(self._activity, 0.0, self._stop, PATIENCE_S if group[0].at_once else None)
        if not group[0].at_once:
            guard.wait_for_requests()
        self._compute(ctx, fitting, documents.recipe, guard)

    def _compute(
        self, ctx: PrepareContext, chunks: Sequence[Ids], recipe: Recipe, guard: RequestGuard
    ) -> None:
        while True:
            try:
                with self._adapter.low_priority(guard):
                    prepare_chunks(ctx, chunks, recipe)
                return
            except Preempted:
                continue  # start over: a pass was interrupted and cannot resume

    # The chunks that wait; the caller holds the lock

    def _count(self, text: str, documents: RequestDocuments, stored: bool) -> None:
        key = _key(text, documents)
        if key not in self._waiting:  # with KV, an earlier process has seen it
            self._waiting[key] = _Waiting(text, documents, requests=int(stored))
            self._characters += len(text)
        found = self._waiting[key]
        found.last, found.requests = documents, found.requests + 1
        self._waiting.move_to_end(key)
        while self._characters > MOST_CHARACTERS:
            _, dropped = self._waiting.popitem(last=False)
            self._characters -= len(dropped.text)

    def _forget(self, chunks: Iterable[_Waiting]) -> None:
        for chunk in chunks:
            if self._waiting.pop(_key(chunk.text, chunk.last), None) is not None:
                self._characters -= len(chunk.text)

    # What preparation needs

    def _ids(self, texts: Sequence[str]) -> list[Ids]:
        return [tuple(self._adapter.template.chunk_ids(text)) for text in texts]

    def _context(self, documents: RequestDocuments) -> PrepareContext:
        template = self._adapter.template
        prefix = tuple(template.prefix_ids(documents.system, think=documents.think))
        corpus = ChunkList([documents.texts], template.chunk_ids, self._embed)
        return PrepareContext(as_engine(self._adapter), self._store, prefix, corpus)

    def _embed(self, texts: Sequence[str]) -> Vectors:
        """Return the embeddings of texts, (n, width); compute those that are not in memory."""
        with self._changed:
            known = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        known |= zip(missing, self._encoder.encode(missing), strict=True) if missing else ()
        with self._changed:
            for text in texts:
                self._vectors[text] = known[text]
                self._vectors.move_to_end(text)
            while len(self._vectors) > MOST_VECTORS:
                self._vectors.popitem(last=False)
        return np.stack([known[text] for text in texts])


def _named(chunks: Sequence[Ids]) -> list[tuple[str, int]]:
    """Return chunks as digests and numbers of tokens."""
    return [(digest_tokens(ids), len(ids)) for ids in chunks]


def _key(text: str, documents: RequestDocuments) -> tuple[object, ...]:
    return text, documents.system, documents.think, documents.recipe.name
