"""A Hugging Face model as kvweave uses it: unmodified, run over chosen rows of a prompt.

Three things are asked of a model: compute rows of a canvas, make a chunk's KV, take one decoding step.
Knows nothing of stores, recipes or documents.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvweave.core import ChunkKV, ModelFingerprint, TokenizedPrompt
from kvweave.errors import PromptTooLong
from kvweave.models import attention
from kvweave.models.canvas import Canvas, PlacedSpan, RowCapture
from kvweave.models.fingerprint import fingerprint
from kvweave.models.probe import probe
from kvweave.models.rotary import KeyWatch, rope_regime
from kvweave.models.template import PromptTemplate


class Adapter:
    """Wraps a loaded model and tokenizer.

    Switches the model to kvweave's attention function, which outside our own passes calls the library's;
    nothing else about the model changes. Raises UnsupportedModel if its KV cannot be represented.
    One pass runs at a time; the object may be shared between threads.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        attention.register()
        model.eval()
        model.set_attn_implementation(attention.ATTENTION_NAME)
        self.model = model
        self.tokenizer = tokenizer
        self.template = PromptTemplate(tokenizer)
        self.geometry, self.rotation = probe(model)
        self.fingerprint: ModelFingerprint = fingerprint(model, tokenizer, name or type(model).__name__)
        self._lock = threading.RLock()

    def rope_regime(self, prompt_tokens: int) -> str:
        """Name of the frequency scaling that a pass of this length runs under; "fixed" where it never changes."""
        return rope_regime(self.model.config, prompt_tokens)

    def outgrows(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length is the first to need the other set of LongRoPE frequencies.

        KV computed under the short set is then of no use any more, and transformers computes it again too.
        """
        return self.rope_regime(prompt_tokens) == "long" != self.rope_regime(prompt_tokens - 1)

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

    def canvas(self, length: int, spans: Sequence[PlacedSpan] = ()) -> Canvas:
        """A canvas over `length` prompt positions with stored spans placed on it."""
        device = self.geometry.device
        placed = tuple(span for span in spans if span.kv.tokens)
        runs = tuple(torch.arange(s.rope_start, s.rope_start + s.kv.tokens, device=device) for s in placed)
        like = torch.empty(0, dtype=self.geometry.dtype, device=device)
        return Canvas(self.geometry.layers, length, placed, self.rotation.angles(runs, length, like))

    def compute(
        self, canvas: Canvas, token_ids: Sequence[int], plan: attention.RowPlan, *, capture: bool = False
    ) -> Tensor:
        """Run the model over the prompt positions `plan.rows` (T,) of `token_ids` (N,).

        Writes their K,V into the canvas; every row attends to all canvas positions up to its own. With
        `capture`, `canvas.capture.kv` afterwards holds their unrotated K and V. Returns the logits of the
        last row, (1, vocab).
        """
        device = self.geometry.device
        ids = torch.tensor(token_ids, device=device)[plan.rows]
        watch = KeyWatch(self.rotation.module) if capture else None
        with self._lock, torch.no_grad(), watch or nullcontext():
            self.rotation.reset_lengths()
            canvas.rows = plan.rows
            canvas.capture = RowCapture(watch, self.geometry.layers, len(token_ids)) if watch else None
            try:
                out = self.model(
                    input_ids=ids[None],
                    position_ids=plan.rows[None],
                    # Any 4D mask stops the library from building its own; our attention goes by the row plan.
                    attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.geometry.dtype, device=device),
                    past_key_values=canvas,
                    use_cache=True,
                    logits_to_keep=1,
                    **{attention.ROWS_KEYWORD: plan},
                )
            finally:
                canvas.rows = None
        logits: Tensor = out.logits[:, -1]
        return logits

    def rows(self, rows: Tensor) -> attention.RowPlan:
        """A plan for plain causal attention of these prompt positions (T,), ascending."""
        return attention.RowPlan(rows.to(self.geometry.device), self.geometry.dtype)

    def encode(self, token_ids: Sequence[int], prefix: ChunkKV | None = None) -> ChunkKV:
        """Prefill a chunk behind a prefix and return the chunk's KV alone, keys unrotated.

        With `prefix` the system prompt's KV this is the `isolated` preparation (FusionRAG eq. 5), without it
        `bare` (CacheClip §2.3).
        """
        before = prefix.token_ids if prefix else ()
        ids = (*before, *token_ids)
        if not token_ids:
            return self.empty_kv()
        self.check_length(len(ids))
        canvas = self.canvas(len(ids), [PlacedSpan(prefix, 0, 0)] if prefix else [])
        self.compute(canvas, ids, self.rows(torch.arange(len(before), len(ids))), capture=True)
        return self.captured(canvas, ids, len(before), len(ids))

    def captured(self, canvas: Canvas, token_ids: Sequence[int], start: int, end: int) -> ChunkKV:
        """The KV of prompt positions `start:end` as the last capturing pass computed it; a copy of its own."""
        assert canvas.capture is not None
        assert canvas.capture.kv is not None
        kv = canvas.capture.kv[:, :, :, start:end].contiguous().cpu()
        return ChunkKV(tuple(token_ids[start:end]), kv)

    def empty_kv(self) -> ChunkKV:
        """The KV of no tokens."""
        g = self.geometry
        return ChunkKV((), torch.empty(g.layers, 2, g.kv_heads, 0, g.head_width, dtype=g.dtype))

    def step(self, canvas: Canvas, token_id: int) -> Tensor:
        """Append one token to the canvas; returns the logits that follow it, (1, vocab)."""
        device = self.geometry.device
        position = canvas.get_seq_length()
        with self._lock, torch.no_grad():
            self.rotation.reset_lengths()
            out = self.model(
                input_ids=torch.tensor([[token_id]], device=device),
                position_ids=torch.tensor([[position]], device=device),
                past_key_values=canvas,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def generate_kwargs(self, canvas: Canvas, prompt: TokenizedPrompt) -> dict[str, object]:
        """Arguments for `model.generate` that continue from a computed canvas.

        The last prompt position is left for `generate` to compute, since it would otherwise run the whole
        prompt again. The canvas is consumed: use it for one call.
        """
        canvas.hold(prompt.tokens - 1)
        ids = torch.tensor([prompt.token_ids], device=self.geometry.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": canvas}
