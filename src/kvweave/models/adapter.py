"""A Hugging Face model as kvweave uses it: unmodified, with its tokenizer, its caches and its way to place stored KV.

Knows nothing of stores, recipes or documents.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvweave.models.attention import ATTENTION_NAME, RowPlan, register_attention
from kvweave.models.batcher import PassBatcher
from kvweave.models.cache_base import AppendableCache
from kvweave.models.critical_layers import middle_layers
from kvweave.models.fingerprint import fingerprint
from kvweave.models.forward import continuation_plan
from kvweave.models.fused_cache import FusedCache, PlacedSpan, check_positions, rope_positions
from kvweave.models.hooks import StopAtLayer, StopForward
from kvweave.models.pass_schedule import PASS_S
from kvweave.models.passes import Passes
from kvweave.models.prompt import PromptTemplate, check_length
from kvweave.models.remembered import ModelMemory
from kvweave.models.rotary import rope_regime
from kvweave.models.shared_spans import SharedSpanCache, SpanPool, can_share
from kvweave.types import ChunkKV, TokenizedPrompt


class Adapter(Passes):
    """Wraps a loaded model and its tokenizer.

    Switches the model to kvweave's attention function; outside kvweave's own passes, that function calls the library's. Also
    hooks the model, so that it attends to a cache by the cache's continuation. Nothing else about the model changes. One pass
    runs at a time; threads may share the object. Raises UnsupportedModel if the model's KV cannot be represented.

    Attributes:
        critical_layers: the layers whose attention best predicts what decoding attends to; at first the middle ones.
        spans: the stored KV that concurrent requests share; None gives each its own copy.
    """

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
        super().__init__(model)
        self.critical_layers = middle_layers(self.geometry.layers)
        self.fingerprint = fingerprint(model, tokenizer, name or type(model).__name__, memory)
        self.spans: SpanPool | None = None

    def new_cache(
        self, length: int, spans: Sequence[PlacedSpan] = (), positions: Tensor | None = None
    ) -> FusedCache:
        """Return a cache over `length` prompt positions with stored spans placed in it.

        `positions` (length,) are the rotary positions of all prompt tokens, if these are not 0 … length − 1. The last must
        be the largest, since generated tokens continue from it. Raises InvalidRequest if it is not, and for spans that
        overlap.
        """
        device = self.geometry.device
        positions = torch.arange(length) if positions is None else positions
        check_positions(positions, length)
        rope_length = int(positions[-1]) + 1 if length else 0
        placed = tuple(sorted((span for span in spans if span.kv.tokens), key=lambda span: span.start))
        like = torch.empty(0, dtype=self.geometry.dtype, device=device)
        angles = self.rotation.angles(rope_positions(placed).to(device), rope_length, like)
        if self.spans is not None and can_share(placed):
            shared = self.spans.share(placed, angles, device)
            return SharedSpanCache(self.geometry.layers, length, placed, shared, angles, positions.to(device))
        return FusedCache(self.geometry.layers, length, placed, angles, positions.to(device))

    def rows(self, rows: Tensor) -> RowPlan:
        """Return a plan for plain causal attention of these prompt positions (T,), ascending."""
        return RowPlan(rows.to(self.geometry.device), self.geometry.dtype)

    def encode(self, token_ids: Sequence[int], *before: ChunkKV) -> ChunkKV:
        """Prefill a chunk after stored KV, in the given order, and return the chunk's KV alone, keys unrotated.

        After the system prompt's KV this is the `isolated` preparation (FusionRAG eq. 5), after nothing `bare`
        (CacheClip §2.3), after the system prompt and other chunks `similar` (FusionRAG eq. 10).
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
        if not self._in_pieces:  # a pass with hooks runs whole
            plan.hooks.append(StopAtLayer(self.geometry.layers - 1))  # the logits are not needed
        with suppress(StopForward):
            self.compute(kv_cache, ids, plan, capture=True)
        return self.extract_chunk_kv(kv_cache, ids, start, len(ids))

    def extract_chunk_kv(
        self, kv_cache: FusedCache, token_ids: Sequence[int], start: int, end: int
    ) -> ChunkKV:
        """Return a copy of the KV of prompt positions `start:end` from the last capturing pass, with captured queries."""
        assert kv_cache.capture is not None
        assert kv_cache.capture.kv is not None
        kv = kv_cache.capture.kv[:, :, :, start:end].contiguous().cpu()
        queries = kv_cache.capture.queries
        if queries is not None:
            queries = queries[:, :, start:end].contiguous().cpu()
        return ChunkKV(tuple(token_ids[start:end]), kv, queries)

    def empty_kv(self) -> ChunkKV:
        """Return the KV of no tokens."""
        g = self.geometry
        return ChunkKV((), torch.empty(g.layers, 2, g.kv_heads, 0, g.head_width, dtype=g.dtype))

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
        return self.start_batching(pass_s, load_ahead=load_ahead)

    def serve_alone(self) -> None:
        """From now on run one pass at a time again, each with its own copy of stored KV. Passes that wait raise Cancelled."""
        self.spans = None
        self.stop_batching()

    def rope_regime(self, prompt_tokens: int) -> str:
        """Name the frequency scaling that a pass of this length uses; "fixed" if it never changes."""
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

    def check_length(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Raise PromptTooLong if prompt and answer do not fit the model's context; the message says by how much."""
        check_length(self.geometry.context_tokens, self.fingerprint.name, prompt_tokens, new_tokens)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so that a clock read afterwards is right."""
        if self.geometry.device.type == "cuda":
            torch.cuda.synchronize(self.geometry.device)
