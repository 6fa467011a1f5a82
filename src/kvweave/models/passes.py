"""Passes of a model: over rows of a prompt or after them, one at a time, in blocks, or together with other threads' passes."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvweave.cancellation import check_cancelled
from kvweave.errors import InvalidRequest
from kvweave.models.attention import (
    ROTATIONS_KEYWORD,
    ROWS_KEYWORD,
    AttentionPlan,
    RowPlan,
    attention_modules,
)
from kvweave.models.batcher import PassBatcher
from kvweave.models.cache_base import AppendableCache
from kvweave.models.forward import (
    LayerTime,
    RowSchedule,
    continuation_plan,
    decoder_layers,
    last_row_only,
    scheduled_rows,
)
from kvweave.models.fused_cache import FusedCache
from kvweave.models.hooks import StopForward, UpdateHook
from kvweave.models.packed import PassRows, run_packed
from kvweave.models.pass_cost import PassCost
from kvweave.models.pass_schedule import PASS_S
from kvweave.models.preemption import BLOCK_TOKENS, LowPriority, PassLock, Preemption
from kvweave.models.projections import StoredQueries, separate_projections
from kvweave.models.rotary import GivenKeys, Rotation, RotationRecorder, RowCapture, rope_regime
from kvweave.models.support import probe
from kvweave.ops.threads import all_threads


class ModelRunner:
    """Calls a model with a cache and a plan.

    Hooks the model once. In any call, rows appended to a cache then attend by its continuation, and a cache is told when
    one of the `attention` layers starts.
    """

    def __init__(self, model: PreTrainedModel, rotation: Rotation, attention: Iterable[nn.Module]) -> None:
        self.model = model
        self.rotation = rotation
        model.register_forward_pre_hook(_use_continuation, with_kwargs=True)
        for module in attention:
            module.register_forward_pre_hook(_announce_layer, with_kwargs=True)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        kv_cache: Cache,
        plan: AttentionPlan | None = None,
        recorder: RotationRecorder | None = None,
        keep: int | Tensor = 1,
    ) -> Tensor:
        """Call the model over token ids (T,) at rotary positions (T,) and return logits (kept, vocab).

        Args:
            ids: token ids (T,).
            positions: rotary positions (T,).
            kv_cache: holds the keys and values that the rows attend to, and takes theirs.
            plan: how the rows attend; None for the model's own masks and the cache's continuation.
            recorder: active for the length of the call.
            keep: how many rows' logits to make, from the end, or the indices of these rows.
        """
        keywords: dict[str, Any] = {}
        if plan is not None:
            # Any 4D mask keeps the library from building its own; our attention follows the plan.
            mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=ids.device)
            keywords = {"attention_mask": mask, ROWS_KEYWORD: plan}
        if recorder is not None:
            keywords[ROTATIONS_KEYWORD] = recorder
        self.rotation.reset_lengths()
        with recorder or nullcontext(), torch.no_grad():
            out = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=kv_cache,
                use_cache=True,
                logits_to_keep=keep,
                **keywords,
            )
        logits: Tensor = out.logits[0]
        return logits


class Passes:
    """Runs a model over rows of prompts, and over tokens after them. Threads may share the object.

    Attributes:
        model: the model, which attends by kvweave's attention function.
        geometry: its shape.
        rotation: how it rotates keys and queries.
        projections: the modules that make queries, keys and values; None if they cannot run on some rows alone.
        batcher: packs the passes of concurrent threads; None runs one at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.geometry, self.rotation = probe(model)
        self.projections = separate_projections(model, self.geometry, self.rotation)
        self.batcher: PassBatcher | None = None
        self._runner = ModelRunner(model, self.rotation, attention_modules(model).values())
        self._layer_time = LayerTime()
        self._lock = PassLock()
        self._thread = threading.local()  # `low`: the priority of this thread's passes, if it is low

    def compute(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: RowPlan,
        *,
        capture: bool = False,
        hook: UpdateHook | None = None,
        row_schedule: RowSchedule | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        """Run the model over the prompt positions `plan.rows` (T,) and return the logits of the last row, (1, vocab).

        Writes their K,V into the cache. Every row attends to all cache positions up to its own.

        Args:
            kv_cache: the prompt's cache.
            token_ids: all of the prompt's, (N,).
            plan: the rows and how they attend.
            capture: afterwards, `kv_cache.capture.kv` holds the rows' unrotated K and V.
            hook: sees what every layer is about to replace.
            row_schedule: may drop rows between layers; the last row stays.
            projected: (W,), some of the rows; these alone are projected and written. The others take queries, keys and
                values from the placed spans. Raises InvalidRequest if the spans hold no queries, or the model has no
                `projections`.
        """
        stored = None if projected is None else self._stored_queries(kv_cache, plan.rows, projected)
        rows = replace(self._pass_rows(kv_cache, token_ids, plan), hook=hook)
        kv_cache.capture = None
        if self._low is not None:
            return self._compute_in_blocks(rows, capture, stored, row_schedule)
        if self.batcher is None:
            recorder = self._recorder(rows, capture, stored)
            with self._one_pass(rows, row_schedule, stored):
                return self._runner.run(rows.ids, rows.positions, kv_cache, plan, recorder)
        if self.batcher.load_ahead:
            kv_cache.load(None)
        if row_schedule is not None or stored is not None or kv_cache.sink is not None:
            alone = partial(self._compute_alone, rows, capture, stored, row_schedule)
            return self.batcher.run_alone(alone)
        if capture:
            kv_cache.capture = RowCapture(GivenKeys(), self.geometry.layers, kv_cache.length)
        in_pieces = hook is None and not plan.hooks and self._same_regime(kv_cache, plan.rows)
        return self.batcher.run(rows, in_pieces=in_pieces)

    def run_partial(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: RowPlan,
        hook: UpdateHook | None = None,
    ) -> None:
        """Run a pass as `compute` does, for its hooks alone; it ends where one raises StopForward.

        The rows of the layers that ran are in the cache. Those of the layer at which the pass ended are too if a hook of
        the plan ended it. If `hook` ended it, that layer and the later ones keep what they held. Raises Cancelled.
        """
        check_cancelled()
        with suppress(StopForward):
            self.compute(kv_cache, token_ids, plan, hook=hook)

    def compute_packed(self, requests: Sequence[tuple[FusedCache, Sequence[int], RowPlan]]) -> list[Tensor]:
        """Do what `compute` does for each (cache, token ids, plan), in one call of the model and without padding.

        Requests whose lengths need other rotary frequencies run in calls of their own. Returns each request's
        logits of its last row, (1, vocab). Raises InvalidRequest if a cache appears twice.
        """
        return self._compute_packed([self._pass_rows(*request) for request in requests])

    def step(self, kv_cache: AppendableCache, token_id: int) -> Tensor:
        """Append one token to the cache and return the logits after it, (1, vocab).

        It attends by the cache's continuation, if there is one. Raises InvalidRequest where a cache with positions or a
        continuation of its own outgrows the short frequencies of a LongRoPE model. The caller computes plain caches
        again in that case, see `needs_rope_rescale`.
        """
        return self._append(kv_cache, torch.tensor([token_id], device=self.geometry.device))

    def append(self, kv_cache: AppendableCache, token_ids: Sequence[int], block_tokens: int = 256) -> Tensor:
        """Append tokens in passes of `block_tokens` and return the last one's logits, (1, vocab).

        Each token attends as a step would. Errors as for `step`; InvalidRequest if there are no tokens.
        """
        for block in self._appended_ids(token_ids).split(block_tokens):
            logits = self._append(kv_cache, block)
        return logits

    def verify_draft(self, kv_cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Append tokens in one pass and return the logits after each of them, (T, vocab). Errors as for `append`."""
        return self._append(kv_cache, self._appended_ids(token_ids), keep=len(token_ids))

    def step_packed(self, steps: Sequence[tuple[FusedCache, int]]) -> list[Tensor]:
        """Do what `step` does for each (cache, token id), in one call of the model; as `compute_packed`."""
        ids = (self._appended_ids([token_id]) for _, token_id in steps)
        return self._compute_packed(
            [self._next_rows(kv_cache, own) for (kv_cache, _), own in zip(steps, ids, strict=True)]
        )

    @contextmanager
    def low_priority(
        self, preemption: Preemption, cost: PassCost | None = None, block_tokens: int = BLOCK_TOKENS
    ) -> Iterator[None]:
        """In this context, this thread's prefills, steps and chunk KV can be preempted, and their cost is counted.

        They may raise what `preemption` raises, and Preempted where a stopped pass cannot be resumed. Packed passes are
        not affected.

        Args:
            preemption: decides when a pass stops, and receives its cost.
            cost: the operations to count; by default the model's own, else those of another shape.
            block_tokens: rows of a prefill that run at once: more are quicker together, and one layer of them takes longer.
        """
        cost = cost or PassCost.of(self.model)
        self._thread.low = LowPriority(decoder_layers(self.model), cost, preemption, block_tokens)
        try:
            yield
        finally:
            self._thread.low = None

    def start_batching(self, pass_s: float = PASS_S, *, load_ahead: bool = True) -> PassBatcher:
        """From now on, pack the passes of concurrent threads; `close` of the result ends it. Options as for PassBatcher."""
        self.batcher = PassBatcher(self._run_packed, pass_s, load_ahead=load_ahead)
        return self.batcher

    def stop_batching(self) -> None:
        """Run one pass at a time again; passes that wait raise Cancelled."""
        batcher, self.batcher = self.batcher, None
        if batcher is not None:
            batcher.close()

    def _append(self, kv_cache: AppendableCache, ids: Tensor, keep: int = 1) -> Tensor:
        """Run one pass over token ids (T,) after the cached ones and return the last `keep` logits, (keep, vocab)."""
        low, rows, length = self._low, kv_cache.next_rows(ids.numel()), kv_cache.get_seq_length()
        run = partial(self._append_alone, ids, kv_cache.positions_of(rows), kv_cache, keep)
        if low is None and self.batcher is not None:
            if isinstance(kv_cache, FusedCache):
                return self.batcher.run(self._next_rows(kv_cache, ids, keep), in_pieces=False)
            return self.batcher.run_alone(run)
        if low is None:
            return run()
        undo = partial(kv_cache.truncate_appended, length) if isinstance(kv_cache, FusedCache) else None
        return low.append(run, undo, rows, keep)

    def _compute_packed(self, packed: Sequence[PassRows]) -> list[Tensor]:
        """Run rows of several requests in one call; return each one's logits. Raises the first error in it."""
        for request in packed:
            if not request.appends:
                request.kv_cache.load(self._layer_time.lower_bound_s(request.ids.numel()))
                request.kv_cache.capture = None
        results = self._run_packed(packed)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [result for result in results if isinstance(result, Tensor)]

    def _next_rows(self, kv_cache: FusedCache, ids: Tensor, keep: int = 1) -> PassRows:
        """Return rows with token ids (T,) that follow what the cache holds; raises as `continuation_plan`."""
        rows = kv_cache.next_rows(ids.numel())
        plan = continuation_plan(self.model, kv_cache, rows)
        if plan is None:
            plan = RowPlan(rows, self.model.dtype)
        return PassRows(kv_cache, ids, kv_cache.positions_of(rows), plan, keep, appends=True)

    @property
    def _in_pieces(self) -> bool:
        """Whether this thread's passes without hooks may run in pieces."""
        return self._low is not None or self.batcher is not None

    def _same_regime(self, kv_cache: FusedCache, rows: Tensor) -> bool:
        """Whether passes over any of these rows (T,) alone use the same frequencies as one over all of them."""
        positions = kv_cache.positions_of(rows)
        lengths = {int(positions.min()) + 1, int(positions.max()) + 1}
        return len({rope_regime(self.model.config, length) for length in lengths}) == 1

    @property
    def _low(self) -> LowPriority | None:
        low: LowPriority | None = getattr(self._thread, "low", None)
        return low

    def _run_packed(self, packed: Sequence[PassRows]) -> list[Tensor | Exception]:
        with self._lock.held(low=False):
            return run_packed(self._runner, packed)

    def _append_alone(self, ids: Tensor, positions: Tensor, kv_cache: AppendableCache, keep: int) -> Tensor:
        low = self._low if isinstance(kv_cache, FusedCache) else None
        with self._lock.held(low=self._low is not None), ExitStack() as stack:
            if low is not None:
                _enter_low_priority(stack, low)
            return self._runner.run(ids, positions, kv_cache, keep=keep)

    def _compute_alone(
        self, rows: PassRows, capture: bool, stored: StoredQueries | None, schedule: RowSchedule | None
    ) -> Tensor:
        recorder = self._recorder(rows, capture, stored)
        with self._one_pass(rows, schedule, stored):
            return self._runner.run(rows.ids, rows.positions, rows.kv_cache, rows.plan, recorder)

    def _compute_in_blocks(
        self, rows: PassRows, capture: bool, stored: StoredQueries | None, schedule: RowSchedule | None
    ) -> Tensor:
        """Run prompt rows at low priority, in blocks where that is possible."""
        kv_cache, plan, low = rows.kv_cache, rows.plan, self._low
        assert low is not None
        recorder = self._recorder(rows, capture, stored)

        def run(block: RowPlan, keep: int | Tensor) -> Tensor:
            own = rows if block is plan else rows.some(block)
            with self._one_pass(own, schedule, stored):
                return self._runner.run(own.ids, own.positions, kv_cache, block, recorder, keep)

        # Hooks and schedules see a pass once, and stored queries are for all of its rows.
        whole = rows.hook is not None or schedule is not None or stored is not None or bool(plan.hooks)
        in_blocks = not whole and self._same_regime(kv_cache, plan.rows)
        return low.prefill(run, plan, in_blocks=in_blocks, resumable=not whole)

    def _recorder(
        self, rows: PassRows, capture: bool, stored: StoredQueries | None
    ) -> RotationRecorder | None:
        """Return what records the pass' rotations, if something needs them; with `capture`, the cache collects its rows."""
        recorder: RotationRecorder | None = stored
        if stored is None and (capture or rows.plan.needs_unrotated):
            recorder = RotationRecorder(self.rotation.module)
        if capture and recorder is not None:
            rows.kv_cache.capture = RowCapture(recorder, self.geometry.layers, rows.kv_cache.length)
        return recorder

    @contextmanager
    def _one_pass(
        self, rows: PassRows, schedule: RowSchedule | None, stored: StoredQueries | None
    ) -> Iterator[None]:
        """Load stored layers, then lock the model, set up its hooks for one pass, and time the pass."""
        kv_cache, count, low, model = rows.kv_cache, rows.ids.numel(), self._low, self.model
        # Before the lock is taken: other requests can use the model meanwhile.
        kv_cache.load(self._layer_time.lower_bound_s(count))
        with self._lock.held(low=low is not None), ExitStack() as stack:
            began = time.perf_counter() - kv_cache.place_s
            written = None if stored is None else stored.projected
            stack.enter_context(kv_cache.writing(rows.plan.rows, rows.hook, written))
            if schedule is not None:
                stack.enter_context(scheduled_rows(model, kv_cache, rows.plan, schedule))
            if low is not None:
                _enter_low_priority(stack, low)  # counts whole layers
            else:
                stack.enter_context(last_row_only(model, kv_cache))
            yield
            stack.close()  # the cache writes its last layer to a sink
            computed_s = time.perf_counter() - kv_cache.place_s - began
            self._layer_time.record(count, computed_s / self.geometry.layers)

    def _appended_ids(self, token_ids: Sequence[int]) -> Tensor:
        if not token_ids:
            raise InvalidRequest("there are no tokens to append")
        return torch.tensor(token_ids, device=self.geometry.device)

    def _pass_rows(self, kv_cache: FusedCache, token_ids: Sequence[int], plan: RowPlan) -> PassRows:
        ids = torch.tensor(token_ids, device=self.geometry.device)[plan.rows]
        return PassRows(kv_cache, ids, kv_cache.positions_of(plan.rows), plan)

    def _stored_queries(self, kv_cache: FusedCache, rows: Tensor, projected: Tensor) -> StoredQueries:
        if self.projections is None:
            raise InvalidRequest(
                f"{type(self.model).__name__} does not make queries, keys and values in modules q_proj, k_proj and v_proj that "
                "rotation of whole heads follows, so that its projections run on all rows; leave `projected` out"
            )
        return StoredQueries(
            self.rotation.module, self.projections, kv_cache.spans, rows, projected.to(rows.device)
        )


def _enter_low_priority(stack: ExitStack, low: LowPriority) -> None:
    """Let requests interrupt what runs in the context; in a server, its thread has helper threads only here."""
    stack.enter_context(all_threads())
    stack.enter_context(low.interruptible())


def _use_continuation(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the continuation's plan to a call that appends to a cache, whether kvweave or `generate` makes it."""
    kv_cache = kwargs.get("past_key_values")
    if not isinstance(kv_cache, AppendableCache) or ROWS_KEYWORD in kwargs:
        return args, kwargs
    plan = continuation_plan(model, kv_cache, kv_cache.next_rows(kwargs["input_ids"].shape[1]))
    return args, (kwargs if plan is None else {**kwargs, ROWS_KEYWORD: plan})


def _announce_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache that a layer's attention starts, so that it can fetch what it needs during the projections."""
    for value in (*args, *kwargs.values()):  # families name the argument differently
        if isinstance(value, AppendableCache):
            value.before_layer(cast(int, module.layer_idx))
