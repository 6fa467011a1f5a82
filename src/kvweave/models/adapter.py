"""A Hugging Face model as kvweave uses it: unmodified, run over chosen rows of a prompt.

Three things are asked of a model: compute rows of a canvas, make a chunk's KV, take one decoding step; the first
and the last for several requests at once too. Knows nothing of stores, recipes or documents.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.models import attention
from kvweave.models.cache_base import AppendableCache
from kvweave.models.critical_layers import middle_layers
from kvweave.models.fingerprint import fingerprint
from kvweave.models.flops import PassCost
from kvweave.models.forward import ModelRunner, Part, appended_plan
from kvweave.models.fused_cache import FusedCache, PlacedSpan, RowCapture, rope_positions
from kvweave.models.partial_layers import RowSchedule, StopAtLayer, decoder_layers, last_row_only, narrowed
from kvweave.models.preemption import LowPriority, Preemption
from kvweave.models.projections import StoredQueries, separate_projections
from kvweave.models.prompt import PromptTemplate
from kvweave.models.rotary import RotationWatch, rope_regime
from kvweave.models.support import attention_modules, probe
from kvweave.models.updates import StopForward, UpdateHook
from kvweave.types import ChunkKV, ModelFingerprint, TokenizedPrompt


class LayerPace:
    """How long one layer takes to compute; nothing, as long as no pass has run."""

    def __init__(self) -> None:
        self._last = (1, 0.0)  # rows, seconds

    def ran(self, rows: int, layer_s: float) -> None:
        """A pass over so many rows took so long for each layer, waiting for stored KV left out."""
        self._last = max(1, rows), max(0.0, layer_s)

    def least_s(self, rows: int) -> float:
        """What a layer of a pass over `rows` takes at least: fewer rows may take less in proportion, more take no less."""
        last, layer_s = self._last
        return layer_s * min(1.0, rows / last)


class Adapter:
    """Wraps a loaded model and tokenizer.

    Switches the model to kvweave's attention function, which outside our own passes calls the library's, and
    hooks it so that a canvas with a continuation of its own is continued by it; nothing else about the model
    changes. Raises UnsupportedModel if its KV cannot be represented.
    One pass runs at a time; the object may be shared between threads.

    `projections` are the modules that make queries, keys and values, where some rows alone can be run through them.
    `critical_layers` are those whose attention from a question tells best what decoding will attend to, as far as that
    is known; the middle ones until whoever loads the model knows better.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        attention.register()
        model.eval()
        model.set_attn_implementation(attention.ATTENTION_NAME)
        self.model = model
        self.tokenizer = tokenizer
        self.template = PromptTemplate(tokenizer)
        self.geometry, self.rotation = probe(model)
        self.projections = separate_projections(model, self.geometry, self.rotation)
        self._passes = ModelRunner(model, self.rotation, attention_modules(model).values())
        self.critical_layers = middle_layers(self.geometry.layers)
        self.fingerprint: ModelFingerprint = fingerprint(model, tokenizer, name or type(model).__name__)
        self._pace = LayerPace()
        self._lock = threading.RLock()
        self._thread = threading.local()  # its passes' priority, if that is low

    @contextmanager
    def low_priority(self, preemption: Preemption, cost: PassCost | None = None) -> Iterator[None]:
        """In this context, this thread's prefills, steps and chunk KV give way as `preemption` says, and are counted.

        Args:
            preemption: who decides, and is told what passes took.
            cost: what they are counted at: another shape's, or by default the model's own.

        They may raise what it raises, and Preempted where a pass cannot go on after it was stopped. Packed passes run
        as ever.
        """
        counted_at = cost or PassCost.of(self.model)
        self._thread.low = LowPriority(decoder_layers(self.model), counted_at, preemption)
        try:
            yield
        finally:
            self._thread.low = None

    @contextmanager
    def _paced(self, kv_cache: FusedCache, rows: Tensor) -> Iterator[None]:
        """Notes how long the layers of a pass over these rows take to compute; of one that raises, nothing."""
        began = time.perf_counter() - kv_cache.place_s
        yield
        self._pace.ran(rows.numel(), (time.perf_counter() - kv_cache.place_s - began) / self.geometry.layers)

    @property
    def _low(self) -> LowPriority | None:
        low: LowPriority | None = getattr(self._thread, "low", None)
        return low

    def rope_regime(self, prompt_tokens: int) -> str:
        """Name of the frequency scaling that a pass of this length runs under; "fixed" where it never changes."""
        return rope_regime(self.model.config, prompt_tokens)

    def needs_rope_rescale(self, prompt_tokens: int, held_tokens: int | None = None) -> bool:
        """Whether a prompt of this length needs the other set of LongRoPE frequencies than its first `held_tokens` did.

        Those are by default all but the last. KV computed under the short set is then of no use any more, and
        transformers computes it again too.
        """
        held = prompt_tokens - 1 if held_tokens is None else held_tokens
        return self.rope_regime(prompt_tokens) == "long" != self.rope_regime(held)

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read afterwards tells the truth."""
        if self.geometry.device.type == "cuda":
            torch.cuda.synchronize(self.geometry.device)

    def check_length(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Raise PromptTooLong, saying by how much, if prompt and answer do not fit the model's context."""
        over = prompt_tokens + new_tokens - self.geometry.context_tokens
        if over > 0:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and the answer may take {new_tokens}: {over} more than the "
                f"{self.geometry.context_tokens} of {self.fingerprint.name}; shorten the question, use fewer or shorter "
                "chunks (--top-k, --drop-chunks), or allow fewer answer tokens (--max-new-tokens)"
            )

    def new_cache(
        self, length: int, spans: Sequence[PlacedSpan] = (), positions: Tensor | None = None
    ) -> FusedCache:
        """A canvas over `length` prompt positions with stored spans placed on it.

        `positions` (length,) are the rotary positions of all prompt tokens where these are not 0 … length − 1. The
        last must be the largest, since generated tokens continue behind it. Raises InvalidRequest where it is not, and for
        spans over one another.
        """
        device = self.geometry.device
        where = torch.arange(length) if positions is None else positions
        _check_positions(where, length)
        reach = int(where[-1]) + 1 if length else 0
        placed = tuple(sorted((span for span in spans if span.kv.tokens), key=lambda span: span.start))
        like = torch.empty(0, dtype=self.geometry.dtype, device=device)
        angles = self.rotation.angles(rope_positions(placed).to(device), reach, like)
        return FusedCache(self.geometry.layers, length, placed, angles, where.to(device))

    def compute(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: attention.RowPlan,
        *,
        capture: bool = False,
        hook: UpdateHook | None = None,
        narrowing: RowSchedule | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        """Run the model over the prompt positions `plan.rows` (T,) of `token_ids` (N,).

        Writes their K,V into the canvas; every row attends to all canvas positions up to its own. With
        `capture`, `kv_cache.capture.kv` afterwards holds their unrotated K and V. `hook` is shown what every layer
        is about to replace. `narrowing` may drop rows on the way; the last row stays. With `projected` (W,), some of the
        rows, these alone are projected and written, and the others take their queries, keys and values from the placed
        spans: raises InvalidRequest where these hold no queries, or the model has no `projections`. Returns the logits
        of the last row, (1, vocab).
        """
        stored = None if projected is None else self._stored_queries(kv_cache, plan.rows, projected)
        rotations: RotationWatch | None = stored
        if stored is None and (capture or plan.wants_unrotated):
            rotations = self._passes.rotation_hook()
        kv_cache.capture = None
        if capture and rotations is not None:
            kv_cache.capture = RowCapture(rotations, self.geometry.layers, len(token_ids))
        low = self._low

        def once(rows: attention.RowPlan, keep: int | Tensor) -> Tensor:
            part = self._part(kv_cache, token_ids, rows)
            written = None if stored is None else stored.projected
            kv_cache.load(self._pace.least_s(rows.rows.numel()))  # keeps nobody else from the model
            with (
                self._lock,
                self._paced(kv_cache, rows.rows),
                kv_cache.writing(rows.rows, hook, written),
                ExitStack() as stack,
            ):
                if narrowing is not None:
                    stack.enter_context(narrowed(self.model, kv_cache, rows, narrowing))
                if low is not None:
                    stack.enter_context(low.stopping())  # which counts whole layers
                else:
                    stack.enter_context(last_row_only(self.model, kv_cache))
                return self._passes.run(part.ids, part.positions, kv_cache, rows, rotations, keep)

        if low is None:
            return once(plan, 1)
        watched = hook is not None or narrowing is not None or bool(plan.hooks)
        watched = watched or stored is not None  # its rows cannot come in blocks
        return low.prefill(once, plan, whole=not self._one_regime(kv_cache, plan.rows), watched=watched)

    def look(
        self,
        kv_cache: FusedCache,
        token_ids: Sequence[int],
        plan: attention.RowPlan,
        hook: UpdateHook | None = None,
    ) -> None:
        """Run a pass as `compute` does, for what watches see of it; ends early where one raises StopForward.

        Layers that ran have their rows in the canvas. The one that was ended at has them if it was ended by a watch of
        the plan; by `hook`, it keeps what it held, as those after it do.
        """
        with suppress(StopForward):
            self.compute(kv_cache, token_ids, plan, hook=hook)

    def compute_packed(
        self, requests: Sequence[tuple[FusedCache, Sequence[int], attention.RowPlan]]
    ) -> list[Tensor]:
        """What `compute` does for each (canvas, token ids, plan), in one call of the model and without padding.

        Requests whose lengths call for other rotary frequencies run in calls of their own. Returns each request's
        logits of its last row, (1, vocab). Raises InvalidRequest if a canvas appears twice.
        """
        parts = [self._part(*request) for request in requests]
        for part in parts:
            part.kv_cache.load(self._pace.least_s(part.plan.rows.numel()))
        with self._lock, ExitStack() as stack:
            for part in parts:
                part.kv_cache.capture = None
                stack.enter_context(part.kv_cache.writing(part.plan.rows))
            return self._passes.run_packed(parts)

    def rows(self, rows: Tensor) -> attention.RowPlan:
        """A plan for plain causal attention of these prompt positions (T,), ascending."""
        return attention.RowPlan(rows.to(self.geometry.device), self.geometry.dtype)

    def encode(self, token_ids: Sequence[int], *before: ChunkKV) -> ChunkKV:
        """Prefill a chunk behind stored KV, one after the other, and return the chunk's KV alone, keys unrotated.

        Behind the system prompt's KV this is the `isolated` preparation (FusionRAG eq. 5), behind nothing `bare`
        (CacheClip §2.3), behind the system prompt and other chunks `similar` (FusionRAG eq. 10).
        """
        if not token_ids:
            return self.empty_kv()
        ids: tuple[int, ...] = ()
        spans = []
        for kv in before:
            spans.append(PlacedSpan(kv, len(ids), len(ids)))
            ids += kv.token_ids
        start, ids = len(ids), (*ids, *token_ids)
        self.check_length(len(ids))
        kv_cache = self.new_cache(len(ids), spans)
        plan = self.rows(torch.arange(start, len(ids)))
        if self._low is None:  # a pass that gives way goes on in blocks, which one that is watched cannot
            plan.hooks.append(StopAtLayer(self.geometry.layers - 1))  # nobody asks for logits
        with suppress(StopForward):
            self.compute(kv_cache, ids, plan, capture=True)
        return self.captured(kv_cache, ids, start, len(ids))

    def captured(self, kv_cache: FusedCache, token_ids: Sequence[int], start: int, end: int) -> ChunkKV:
        """The KV of prompt positions `start:end` as the last capturing pass computed it, with queries that it kept; a copy."""
        assert kv_cache.capture is not None
        assert kv_cache.capture.kv is not None
        kv = kv_cache.capture.kv[:, :, :, start:end].contiguous().cpu()
        queries = kv_cache.capture.queries
        if queries is not None:
            queries = queries[:, :, start:end].contiguous().cpu()
        return ChunkKV(tuple(token_ids[start:end]), kv, queries)

    def empty_kv(self) -> ChunkKV:
        """The KV of no tokens."""
        g = self.geometry
        return ChunkKV((), torch.empty(g.layers, 2, g.kv_heads, 0, g.head_width, dtype=g.dtype))

    def check_goes_on(self, held: AppendableCache, tokens: int) -> None:
        """Raise InvalidRequest where that many tokens behind what is held need other frequencies than it has; see `step`."""
        appended_plan(self.model, held, held.next_rows(tokens))

    def keeps_frequencies(self, kv_cache: FusedCache, tokens: int) -> bool:
        """Whether that many tokens, appended one by one, would all run under the frequencies that the canvas has."""
        return self._one_regime(
            kv_cache, kv_cache.next_rows(1 + tokens) - 1
        )  # from the last one that it holds on

    def step(self, kv_cache: AppendableCache, token_id: int) -> Tensor:
        """Append one token to the canvas; returns the logits that follow it, (1, vocab).

        It stands behind the canvas' last position and attends by the canvas' continuation, if that has one. Raises
        InvalidRequest where a canvas with positions or a continuation of its own outgrows the short frequencies of
        a LongRoPE model; plain ones are computed anew then, see `needs_rope_rescale`.
        """
        return self._append(kv_cache, torch.tensor([token_id], device=self.geometry.device))

    def extend(self, held: AppendableCache, token_ids: Sequence[int], block_tokens: int = 256) -> Tensor:
        """Append tokens, a next turn or a prompt that never stands on a canvas; returns the last one's logits (1, vocab).

        They are computed in passes of `block_tokens`, each attending to what is held as a step would. Errors as for
        `step`; InvalidRequest if there are no tokens.
        """
        if not token_ids:
            raise InvalidRequest("there are no tokens to append")
        ids = torch.tensor(token_ids, device=self.geometry.device)
        for block in ids.split(block_tokens):
            logits = self._append(held, block)
        return logits

    def follow(self, kv_cache: FusedCache, token_ids: Sequence[int]) -> Tensor:
        """Append tokens in one pass; returns the logits behind each of them, (T, vocab). Errors as for `extend`."""
        if not token_ids:
            raise InvalidRequest("there are no tokens to append")
        ids = torch.tensor(token_ids, device=self.geometry.device)
        return self._append(kv_cache, ids, every_logits=True)

    def step_packed(self, steps: Sequence[tuple[FusedCache, int]]) -> list[Tensor]:
        """What `step` does for each (canvas, token id), in one call of the model; as `compute_packed`."""
        parts = []
        for kv_cache, token_id in steps:
            row = kv_cache.next_rows(1)
            plan = appended_plan(self.model, kv_cache, row) or self.rows(row)
            ids = torch.tensor([token_id], device=self.geometry.device)
            parts.append(Part(kv_cache, ids, kv_cache.positions_of(row), plan))
        with self._lock:
            return self._passes.run_packed(parts)

    def generate_kwargs(self, kv_cache: FusedCache, prompt: TokenizedPrompt) -> dict[str, object]:
        """Arguments for `model.generate` that continue from a computed canvas, by its positions and continuation.

        The last prompt position is left for `generate` to compute, since it would otherwise run the whole
        prompt again. The canvas is consumed: use it for one call.
        """
        kv_cache.hold(prompt.tokens - 1)
        ids = torch.tensor([prompt.token_ids], device=self.geometry.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": kv_cache.positions[None],
            "past_key_values": kv_cache,
        }

    def _one_regime(self, kv_cache: FusedCache, rows: Tensor) -> bool:
        """Whether a pass over any of these rows (T,) alone runs under the same frequencies as over all of them."""
        positions = kv_cache.positions_of(rows)
        lengths = {int(positions.min()) + 1, int(positions.max()) + 1}
        return len({self.rope_regime(length) for length in lengths}) == 1

    def _append(self, held: AppendableCache, ids: Tensor, every_logits: bool = False) -> Tensor:
        """One pass over token ids (T,) behind what is held; the last one's logits (1, vocab), or those of each (T, vocab)."""
        low, rows, length = self._low, held.next_rows(ids.numel()), held.get_seq_length()
        undo = partial(held.shrink, length) if isinstance(held, FusedCache) else None
        stopping = low.stopping if low is not None and undo is not None else nullcontext
        kept = ids.numel() if every_logits else 1

        def once() -> Tensor:
            with self._lock, stopping():
                return self._passes.run(ids, held.positions_of(rows), held, keep=kept)

        return once() if low is None else low.append(once, undo, rows, kept)

    def _stored_queries(self, kv_cache: FusedCache, rows: Tensor, projected: Tensor) -> StoredQueries:
        if self.projections is None:
            raise InvalidRequest(
                f"{type(self.model).__name__} does not make queries, keys and values in modules q_proj, k_proj and v_proj that "
                "rotation of whole heads follows, so that its projections run on all rows; leave `projected` out"
            )
        return StoredQueries(
            self.rotation.module, self.projections, kv_cache.spans, rows, projected.to(rows.device)
        )

    def _part(self, kv_cache: FusedCache, token_ids: Sequence[int], plan: attention.RowPlan) -> Part:
        ids = torch.tensor(token_ids, device=self.geometry.device)[plan.rows]
        return Part(kv_cache, ids, kv_cache.positions_of(plan.rows), plan)


def _check_positions(positions: Tensor, length: int) -> None:
    if positions.shape != (length,):
        raise InvalidRequest(
            f"positions have shape {tuple(positions.shape)} for a prompt of {length} tokens; one each is needed"
        )
    if length and int(positions[-1]) != int(positions.max()):
        raise InvalidRequest(
            f"the last token stands at rotary position {int(positions[-1])}, before {int(positions.max())}; the question "
            "must stand behind everything, since the answer follows it"
        )
