"""Which tokens of a request the scheduler leaves to kvweave, when, and how many rows the passes of one step may have."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

from kvweave.errors import StoreError
from kvweave.kvstore.kv_store import KVStore
from kvweave.recipes.match import missing_chunks
from kvweave.recipes.request import PrefillRequest
from kvweave.remote.fields import SALT, InvalidField, Task, read_task
from kvweave_vllm.model import Served
from kvweave_vllm.reads import Load

_LOG = logging.getLogger(__name__)


READ_S: Final = 30.0
"""A request whose stored KV has not been read by then is prefilled without kvweave."""


@dataclass(slots=True)
class Work:
    """What the workers do in one step: begin reads, forget reads, and then put KV into blocks."""

    reads: list[Load] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Claims:
    """Decides for each new request, and collects what one step's workers have to do.

    The workers first read what is stored for a request, in the background: until all of them have, vLLM skips the request and
    serves others. So no step waits for the store.

    The rows of all requests of a step are at most `max_rows` of `kv_connector_extra_config`, by default as many as the
    tokens that vLLM itself may schedule in a step: so other requests wait for at most one full step more. A
    request that needs more rows for all its chunks has its first chunks reused, and vLLM prefills the others.
    """

    def __init__(self, served: Served, store: KVStore, vllm_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._max_rows = int(extra.get("max_rows", vllm_config.scheduler_config.max_num_batched_tokens))
        self._elsewhere = "shared" in extra  # what is not listed here may be in the shared tier
        # Keys depend on nothing else of an engine.
        self._engine: Any = SimpleNamespace(
            fingerprint=served.fingerprint, rope_regime=lambda tokens: "fixed"
        )
        self._store = store
        self._tasks: dict[str, Task | None] = {}
        self._claims: dict[str, tuple[Load, int]] = {}  # without blocks, and with the rows that it needs
        self._workers: int = vllm_config.parallel_config.world_size
        self._most_reads: int = vllm_config.scheduler_config.max_num_seqs
        self._reading: dict[str, tuple[int, float]] = {}  # workers that have not read yet, and when it began
        self._work = Work()
        self._rows = 0

    def claim(self, request: Any, computed: int) -> int | None:
        """Return how many tokens after the first `computed` ones kvweave provides; None to be asked again in the next step."""
        task, name = self._task(request), request.request_id
        if task is None or task.budget.recomputes_all:  # vLLM computes all of it anyway
            return 0
        left, began = self._reading.get(name, (0, 0.0))
        if left and time.monotonic() - began < READ_S:
            return None
        try:
            if left:
                raise StoreError(f"its stored KV was not read within {READ_S:g} s")
            needed = self._needed(task, request.prompt_token_ids, computed)
        except (StoreError, OSError) as error:
            _LOG.warning("request %s is prefilled without kvweave: %s", name, error)
            self._tasks[name] = None
            self.drop(request)
            return 0
        count = len(task.spans)
        while count and task.previous is None and needed[count - 1] > self._max_rows:
            count -= 1
        end = task.spans[count - 1][1] if count else 0
        if end <= computed:
            self.drop(request)
            return 0
        load = Load(name, tuple(request.prompt_token_ids), (), computed, task.first(count))
        if task.previous is None and name not in self._reading:
            if len(self._reading) < self._most_reads:
                self._reading[name] = self._workers, time.monotonic()
                self._tasks[name] = load.task  # what is read is all that it can have
                self._work.reads.append(load)
            return None
        rows = needed[count - 1]
        if self._rows and self._rows + rows > self._max_rows:
            return None
        self._claims[name] = load, rows
        return end - computed

    def allocated(self, request: Any, blocks: list[int]) -> None:
        """Add a request that has its blocks to what the worker does in this step."""
        load, rows = self._claims.pop(request.request_id)
        self._work.loads.append(replace(load, blocks=tuple(blocks)))
        self._reading.pop(request.request_id, None)
        self._rows += rows

    def read(self, requests: Iterable[str]) -> None:
        """Take note that a worker has read what is stored for these requests, each named once for each worker."""
        for name in requests:
            if name in self._reading:
                left, began = self._reading[name]
                self._reading[name] = left - 1, began

    def drop(self, request: Any) -> None:
        """Have the workers forget what they read or are reading for a request, if they do."""
        if self._reading.pop(request.request_id, None) is not None:
            self._work.dropped.append(request.request_id)

    def finished(self, request: Any) -> None:
        """Forget a request."""
        self._tasks.pop(request.request_id, None)
        self._claims.pop(request.request_id, None)
        self.drop(request)

    def step(self) -> Work:
        """Return what the workers do in this step, and begin the next one."""
        work, self._work, self._rows = self._work, Work(), 0
        self._claims.clear()
        return work

    def _task(self, request: Any) -> Task | None:
        """Return what a request asks for; None, with a warning, for what cannot be honoured: it is then prefilled as any other."""
        if request.request_id not in self._tasks:
            self._tasks[request.request_id] = None
            try:
                task = read_task(request.kv_transfer_params, request.prompt_token_ids or ())
                if task is not None and not task.exact and not (request.cache_salt or "").startswith(SALT):
                    raise InvalidField(
                        "cache_salt",
                        f"it does not begin with {SALT}, so that others could take this KV for exact",
                    )
                self._tasks[request.request_id] = task if task is not None and task.spans else None
            except InvalidField as error:
                _LOG.warning("request %s is prefilled without kvweave: %s", request.request_id, error)
        return self._tasks[request.request_id]

    def _needed(self, task: Task, token_ids: list[int], computed: int) -> list[int]:
        """Return about how many rows run, at most, if the first 1, 2, … chunks are provided."""
        prompt, budget = task.prompt(token_ids), task.budget
        if task.previous is not None:  # each chunk alone, and the last one after the others
            return [2 * len(token_ids)] * len(task.spans)
        request = PrefillRequest(self._engine, self._store, prompt, budget)
        missing = set(missing_chunks(request, task.recipe.match, task.recipe.prepare))
        question, fresh, stale, needed = prompt.spans[-1].tokens, 0, 0, []
        for number, span in enumerate(prompt.spans[:-1]):
            tokens = max(0, span.end - max(span.start, computed))
            given = span.kind == "chunk" and (span.start, span.end) in task.spans
            if span.kind == "system" or (number in missing and not (given and self._elsewhere)):
                fresh += tokens
            else:
                stale += tokens
            if given:
                scoring = (
                    0 if budget.recomputes_none or not task.recipe.select.selective else fresh + question
                )
                needed.append(fresh + budget.max_rows(stale) + scoring)
        return needed
