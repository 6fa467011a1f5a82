"""What the store has of requests' chunks is read in threads, while vLLM's steps serve other requests."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from kvweave.errors import DamagedEntry
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.kv_store import KVStore
from kvweave.machine import use_one_thread
from kvweave.models.engine import Engine
from kvweave.recipes.context import Ids
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.remote.fields import Task
from kvweave.types import ChunkFeature

_LOG = logging.getLogger(__name__)

READ_THREADS: Final = 4
"""Reads at a time, where there is one worker."""


@dataclass(frozen=True, slots=True)
class Load:
    """A request whose tokens from `first` on, up to the end of its task's chunks, kvweave puts into its `blocks`."""

    request: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    first: int
    task: Task


@dataclass(frozen=True)
class ReadRequest(PrefillRequest):
    """A request that keeps the features that were read for it."""

    kept: dict[tuple[FeatureExtractor, Ids], ChunkFeature | None] = field(default_factory=dict)

    def features(self, extractor: FeatureExtractor, chunks: Sequence[Ids]) -> list[ChunkFeature | None]:
        """Return the features of chunks; look up those that are not kept."""
        missing = [ids for ids in chunks if (extractor, ids) not in self.kept]
        if missing:
            found = super().features(extractor, missing)
            self.kept.update({(extractor, ids): each for ids, each in zip(missing, found, strict=True)})
        return [self.kept[extractor, ids] for ids in chunks]


@dataclass(frozen=True, slots=True)
class Read:
    """What the store has for a request, in memory and verified; it stays there until the request's lease is closed."""

    request: ReadRequest
    matched: tuple[Matched, ...]

    def first(self, load: Load, tokens: int, store: KVStore) -> "Read":
        """Return the same for a load of the request, which may have fewer chunks, and the first `tokens` tokens of its prompt.

        `store` is what later look-ups ask.
        """
        prompt = load.task.prompt(load.token_ids[:tokens])
        *chunks, question = prompt.spans
        last = replace(self.matched[-1], span=question)
        return Read(replace(self.request, prompt=prompt, store=store), (*self.matched[: len(chunks)], last))

    def close(self) -> None:
        """Let the store evict what was read."""
        assert self.request.lease is not None
        self.request.lease.close()


class Reader:
    """Reads what the store has for requests, each once, in the order in which they come.

    A read that fails raises its error when it is taken.
    """

    def __init__(self, engine: Engine, store: KVStore, threads: int) -> None:
        self._engine, self._store = engine, store
        self._pool = ThreadPoolExecutor(threads, "kvweave-read", use_one_thread)
        self._reads: dict[str, Future[Read]] = {}
        self._unreported: set[str] = set()

    def update(self, begun: Iterable[Load], dropped: Iterable[str]) -> None:
        """Begin reads for requests, and forget those of others, which release what they hold when they end."""
        for load in begun:
            self._reads[load.request] = self._pool.submit(self._read, load)
            self._unreported.add(load.request)
        for request in dropped:
            self._reads.pop(request).add_done_callback(_close)
            self._unreported.discard(request)

    def take(self, load: Load) -> Read:
        """Return what was read for a request, which the caller closes; wait for it if need be."""
        self._unreported.discard(load.request)
        return self._reads.pop(load.request).result()

    def ended(self) -> list[str]:
        """Return the requests whose reads have ended since the last call."""
        ended = sorted(request for request in self._unreported if self._reads[request].done())
        self._unreported.difference_update(ended)
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until all reads have ended that were not reported, so that their requests start together."""
        wait([self._reads[request] for request in self._unreported], seconds)

    def close(self) -> None:
        """Begin no more reads, and wait for those that run."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, load: Load) -> Read:
        task = load.task
        with ExitStack() as undo:
            lease = undo.enter_context(self._store.lease())
            request = ReadRequest(self._engine, self._store, task.prompt(load.token_ids), task.budget, lease)
            matched = self._verified(load, request)
            if not task.budget.recomputes_none:
                stale = [request.prompt.ids(each.span) for each in matched if each.origin == "reused"]
                for extractor in task.recipe.select.extractors:
                    request.features(extractor, stale)
            undo.pop_all()
        return Read(request, matched)

    def _verified(self, load: Load, request: ReadRequest) -> tuple[Matched, ...]:
        """Find stored KV and read all of it, so that the step that uses it neither waits nor finds damage."""
        while True:  # a damaged entry is dropped, and not found again
            try:
                matched = load.task.recipe.match.find(request, load.task.recipe.prepare)
                for each in matched:
                    if each.kv is not None:
                        verify_content(each.kv)
                return matched
            except DamagedEntry as error:
                _LOG.warning("retrying without an entry that cannot be used: %s", error)


def _close(read: Future[Read]) -> None:
    if not read.cancelled() and read.exception() is None:
        read.result().close()
