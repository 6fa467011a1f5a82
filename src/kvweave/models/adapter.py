"""A Hugging Face model as kvweave uses it: unmodified, with its tokenizer, its caches and its way to place stored KV.

Knows nothing of stores, recipes or documents.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvweave.errors import InvalidRequest
from kvweave.machine import all_threads
from kvweave.models.attention import (
    ATTENTION_NAME,
    ROWS_KEYWORD,
    AttentionPlan,
    RowPlan,
    register_attention,
)
from kvweave.models.batcher import PassBatcher
from kvweave.models.cache_base import AppendableCache
from kvweave.models.engine import Engine
from kvweave.models.fingerprint import ModelMemory, WatchedFingerprint
from kvweave.models.forward import (
    LayerTime,
    continuation_plan,
    decoder_layers,
    hook_caches,
    last_row_only,
)
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.packed import run_packed
from kvweave.models.pass_schedule import PASS_S, PassRows
from kvweave.models.preemption import BLOCK_TOKENS, LowPriority, PassCost, PassLock, Preemption
from kvweave.models.prompt import PromptTemplate
from kvweave.models.rotary import (
    GivenKeys,
    PlacedRotation,
    Rotation,
    RotationRecorder,
    RowCapture,
    rope_regime,
)
from kvweave.models.shared_spans import SharedSpanCache, SpanPool, can_share
from kvweave.models.support import middle_layers, probe
from kvweave.types import ModelFingerprint, TokenizedPrompt


class Adapter(Engine):
    """Wraps a loaded model and its tokenizer.

    Switches the model to kvweave's attention function; outside kvweave's own passes, that function calls the library's. Also
    hooks the model, so that it attends to a cache by the cache's continuation. Nothing else about the model changes. One pass
    runs at a time; threads may share the object. Raises UnsupportedModel if the model's KV cannot be represented.

    Attributes:
        batcher: packs the passes of concurrent threads; None runs one at a time.
        spans: the stored KV that concurrent requests share; None gives each its own copy.
    """

    rotation: Rotation

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "",
        memory: ModelMemory | None = None,
    ) -> None:
        register_attention()
        model.eval()
        model.set_attn_implementation(ATTENTION_NAME)
        self.tokenizer = tokenizer
        self.template = PromptTemplate(tokenizer)
        self.model = model
        self.geometry, self.rotation = probe(model)
        self.batcher: PassBatcher | None = None
        hook_caches(model)
        self._layer_time = LayerTime()
        self._lock = PassLock()
        self._thread = threading.local()  # `low`: the priority of this thread's passes, if it is low
        self.critical_layers = middle_layers(self.geometry.layers)
        self._fingerprint = WatchedFingerprint(model, tokenizer, name or type(model).__name__, memory)
        self.spans: SpanPool | None = None

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Names the weights and everything else that stored KV depends on, as `check_weights` last found them."""
        return self._fingerprint.value

    def check_weights(self) -> ModelFingerprint:
        """Return the fingerprint, made anew if the weights were changed; called once in a request."""
        return self._fingerprint.check()

    @property
    def stops_early(self) -> bool:
        return self._low is None and self.batcher is None  # else a pass with hooks runs whole

    # Caches

    def _cache_of(
        self,
        length: int,
        placed: tuple[PlacedSpan, ...],
        angles: PlacedRotation,
        positions: Tensor,
        *,
        share: bool,
    ) -> FusedCache:
        if share and self.spans is not None and can_share(placed):
            shared = self.spans.share(placed, angles, self.geometry.device)
            return SharedSpanCache(self.geometry.layers, length, placed, shared, angles, positions)
        return FusedCache(self.geometry.layers, length, placed, angles, positions)

    # Passes

    def compute(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: RowPlan,
        *,
        capture: bool = False,
        unrotated: bool = False,
    ) -> Tensor:
        rows = self._pass_rows(kv_cache, token_ids, plan)
        recorder = RotationRecorder(self.rotation.module) if capture or unrotated else None
        kv_cache.capture = None
        if recorder is not None:
            packs = self.batcher is not None and self._low is None and not self._runs_alone(rows)
            given = GivenKeys() if packs else recorder
            kv_cache.capture = RowCapture(given, self.geometry.layers, kv_cache.length, keep=capture)
        if self._low is not None:
            return self._compute_in_blocks(rows, recorder)
        if self.batcher is None:
            with self._one_pass(rows):
                return self.call_model(rows.ids, rows.positions, kv_cache, plan, recorder)
        if self.batcher.load_ahead:
            kv_cache.load(None)
        if self._runs_alone(rows):
            return self.batcher.run_alone(partial(self._compute_alone, rows, recorder))
        in_pieces = not plan.hooks and self._same_regime(kv_cache, plan.rows)
        return self.batcher.run(rows, in_pieces=in_pieces)

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
        cost = cost or PassCost.of(self.model, self.geometry)
        self._thread.low = LowPriority(decoder_layers(self.model), cost, preemption, block_tokens)
        try:
            yield
        finally:
            self._thread.low = None

    def generate_kwargs(self, kv_cache: FusedCache, prompt: TokenizedPrompt) -> dict[str, object]:
        """Return arguments for `model.generate` that continue from a computed cache.

        The last prompt position is left for `generate` to compute, since it would otherwise compute the whole
        prompt again. The call consumes the cache: use the arguments once.
        """
        kv_cache.truncate_prompt(prompt.tokens - 1)
        ids = torch.tensor([prompt.token_ids], device=self.geometry.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": kv_cache.positions[None],
            "past_key_values": kv_cache,
        }

    def call_model(
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
            plan: how the rows attend; None for the model's own masks and the cache's continuation.
            recorder: active for the length of the call.
            keep: how many rows' logits to make, from the end, or the indices of these rows.
        """
        keywords: dict[str, Any] = {}
        if plan is not None:
            # Any 4D mask keeps the library from building its own; our attention follows the plan.
            mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=ids.device)
            keywords = {"attention_mask": mask, ROWS_KEYWORD: plan}
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

    # Many requests at once

    def serve_many(
        self, *, share: bool = True, pass_s: float = PASS_S, load_ahead: bool = True
    ) -> PassBatcher:
        """From now on pack the passes of concurrent threads and, with `share`, keep one copy of the stored KV they use.

        Until `serve_alone`. Other options are those of PassBatcher. Models whose frequencies change with the length share
        nothing.
        """
        # Their embedding remembers a call's length: no other thread may place spans during a pass.
        changing = self.rope_regime(sys.maxsize) != "fixed"
        self.spans = SpanPool() if share and not changing else None
        self.batcher = PassBatcher(self._run_packed, pass_s, load_ahead=load_ahead)
        return self.batcher

    def serve_alone(self) -> None:
        """From now on run one pass at a time again, each with its own copy of stored KV. Passes that wait raise Cancelled."""
        self.spans = None
        batcher, self.batcher = self.batcher, None
        if batcher is not None:
            batcher.close()

    # Lengths

    def rope_regime(self, prompt_tokens: int) -> str:
        return rope_regime(self.model.config, prompt_tokens)

    def needs_rope_rescale(self, prompt_tokens: int, held_tokens: int | None = None) -> bool:
        """Whether a prompt of this length needs LongRoPE's long frequencies, and its first `held_tokens` the short ones.

        `held_tokens` are by default all but the last. KV computed under the short frequencies is of no use then;
        transformers computes it again too.
        """
        held = prompt_tokens - 1 if held_tokens is None else held_tokens
        return self.rope_regime(prompt_tokens) == "long" != self.rope_regime(held)

    def stays_in_rope_regime(self, kv_cache: FusedCache, tokens: int) -> bool:
        """Whether the next `tokens` appended tokens would all run under the frequencies of the cached KV."""
        held_and_next = kv_cache.next_rows(1 + tokens) - 1  # the last cached row and the new ones
        return self._same_regime(kv_cache, held_and_next)

    def check_append(self, kv_cache: AppendableCache, tokens: int) -> None:
        """Raise InvalidRequest if that many more tokens need other frequencies than the cached KV; see `step`."""
        continuation_plan(self.model, kv_cache, kv_cache.next_rows(tokens))

    # Inside

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
            return run_packed(packed, self.call_model, self.rope_regime, self.rotation.module)

    def _append_alone(self, ids: Tensor, positions: Tensor, kv_cache: AppendableCache, keep: int) -> Tensor:
        low = self._low if isinstance(kv_cache, FusedCache) else None
        with self._lock.held(low=self._low is not None), ExitStack() as stack:
            if low is not None:
                _enter_low_priority(stack, low)
            return self.call_model(ids, positions, kv_cache, keep=keep)

    def _compute_alone(self, rows: PassRows, recorder: RotationRecorder | None) -> Tensor:
        with self._one_pass(rows):
            return self.call_model(rows.ids, rows.positions, rows.kv_cache, rows.plan, recorder)

    def _compute_in_blocks(self, rows: PassRows, recorder: RotationRecorder | None) -> Tensor:
        """Run prompt rows at low priority, in blocks where that is possible."""
        kv_cache, plan, low = rows.kv_cache, rows.plan, self._low
        assert low is not None

        def run(block: RowPlan, keep: int | Tensor) -> Tensor:
            own = rows if block is plan else rows.some(block)
            with self._one_pass(own):
                return self.call_model(own.ids, own.positions, kv_cache, block, recorder, keep)

        # Hooks see a pass once.
        whole = plan.around is not None or bool(plan.hooks)
        in_blocks = not whole and self._same_regime(kv_cache, plan.rows)
        return low.prefill(run, plan, in_blocks=in_blocks, resumable=not whole)

    @staticmethod
    def _runs_alone(rows: PassRows) -> bool:
        """Whether a pass shares its call of the model with no other rows."""
        return rows.plan.around is not None or rows.kv_cache.sink is not None

    @contextmanager
    def _one_pass(self, rows: PassRows) -> Iterator[None]:
        """Load stored layers, then lock the model, set up its hooks for one pass, and time the pass."""
        kv_cache, count, low, model = rows.kv_cache, rows.ids.numel(), self._low, self.model
        # Before the lock is taken: other requests can use the model meanwhile.
        kv_cache.load(self._layer_time.lower_bound_s(count))
        with self._lock.held(low=low is not None), ExitStack() as stack:
            began = time.perf_counter() - kv_cache.place_s
            stack.enter_context(kv_cache.writing(rows.plan.rows))
            if rows.plan.around is not None:
                stack.enter_context(rows.plan.around(model, rows.plan))
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


def _enter_low_priority(stack: ExitStack, low: LowPriority) -> None:
    """Let requests interrupt what runs in the context; in a server, its thread has helper threads only here."""
    stack.enter_context(all_threads())
    stack.enter_context(low.interruptible())
