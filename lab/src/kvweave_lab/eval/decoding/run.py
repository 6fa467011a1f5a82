"""One long text decoded under one variant, step by step, with a recorder.

The prompt is prefilled once and copied into every variant's KV.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvweave.answering.generation import end_tokens
from kvweave.decode.handoff import MAX_QUERY_ROWS
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.models.adapter import Adapter
from kvweave.models.hooks import LayerQueries
from kvweave_lab.eval.decoding.recorder import Recorder, attach_recorder, cluster_variance
from kvweave_lab.eval.decoding.results import Run, Segment, sum_reuse
from kvweave_lab.eval.long_texts import LongText, Reply
from kvweave_lab.strategies import counts_since

RECORD_EVERY = 8
"""One of this many steps is recorded, since exact attention costs as much as dense decoding."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A text's prompt: the KV of each layer, and the logits (1, vocab) of its last token."""

    text: LongText
    layers: "_PromptLayers"
    logits: Tensor

    @classmethod
    def of(cls, adapter: Adapter, text: LongText) -> "Prefilled":
        """Compute a text's prompt in full."""
        ids = text.token_ids[: text.prompt_tokens]
        kv_cache, layers = adapter.new_cache(len(ids)), _PromptLayers()
        kv_cache.stream_to(layers)
        plan = adapter.rows(torch.arange(len(ids)))
        plan.hooks.append(layers)
        return cls(text, layers, adapter.compute(kv_cache, ids, plan))

    @property
    def retrieving_layers(self) -> list[int]:
        """The layers without a sliding window."""
        return [index for index, (*_, window) in enumerate(self.layers.received) if window is None]

    def state(self) -> dict[str, object]:
        """Return what `restore` needs besides the text, for torch.save."""
        return {"layers": self.layers.received, "logits": self.logits}

    @classmethod
    def restore(cls, text: LongText, state: Mapping[str, Any]) -> "Prefilled":
        """Return a text's prompt from its `state`."""
        layers = _PromptLayers()
        layers.received = [
            (keys, values, queries, window) for keys, values, queries, window in state["layers"]
        ]
        return cls(text, layers, state["logits"])

    def fill(self, offloaded: OffloadedCache) -> None:
        """Copy the prompt's KV into a variant's cache."""
        for index, (keys, values, queries, window) in enumerate(self.layers.received):
            offloaded.fill(index, keys, values, queries, window)


class _PromptLayers:
    """Receives the layers of a prompt: keys and values (G, N, D), the last rows' queries, the window."""

    bounded = False

    def __init__(self) -> None:
        self.received: list[tuple[Tensor, Tensor, Tensor, int | None]] = []

    def begin(self, positions: Tensor) -> None:
        """Do nothing, since there is only one prompt."""

    def on_layer(self, queries: LayerQueries) -> None:
        self._last_queries = queries.query[0, :, -MAX_QUERY_ROWS:].clone(), queries.settings.window

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.received.append((keys, values, *self._last_queries))  # this object now owns the tensors


def decode(
    adapter: Adapter,
    prefilled: Prefilled,
    variant: str,
    settings: OffloadSettings,
    lengths: Sequence[int],
    at_length: Callable[[int, OffloadedCache], None] = lambda length, offloaded: None,
) -> Run:
    """Decode the text to the last of `lengths` under `settings`, which are those of `variant`.

    `at_length` is called with the KV at the end of each segment. Raises InvalidRequest if the memory limit is too small,
    StoreError and StoreFull for the disk.
    """
    text, recorder = prefilled.text, Recorder()
    with OffloadedCache(adapter.geometry, settings, torch.arange(text.prompt_tokens)) as offloaded:
        trackers = attach_recorder(offloaded, recorder, text.seed)
        prefilled.fill(offloaded)
        decoding = _Decoding(adapter, prefilled, offloaded, recorder)
        segments = []
        for length in lengths:
            segments.append(decoding.advance_to(length))
            at_length(length, offloaded)
    return Run(
        text=text.name,
        task=text.task,
        seed=text.seed,
        variant=variant,
        storage=settings.storage,
        budget=settings.kv_budget,
        prompt_tokens=text.prompt_tokens,
        forced=not text.free_tokens,
        greedy=tuple(decoding.greedy),
        segments=tuple(segments),
        updated=sum_reuse([tracker.updated.reuse() for tracker in trackers]),
        drawn=sum_reuse([tracker.drawn.reuse() for tracker in trackers]),
    )


class _Decoding:
    """The progress through a text, and the greedy tokens so far."""

    def __init__(
        self, adapter: Adapter, prefilled: Prefilled, offloaded: OffloadedCache, recorder: Recorder
    ) -> None:
        self._adapter, self._offloaded, self._recorder = adapter, offloaded, recorder
        self._text = prefilled.text
        self._logits = prefilled.logits
        self._ends = end_tokens(adapter)
        self.greedy: list[int] = []

    def advance_to(self, length: int) -> Segment:
        """Decode until `length` tokens are decoded; return the segment."""
        before, first = replace(self._offloaded.counts), len(self.greedy)
        latencies, losses = [], []
        while len(self.greedy) < length:
            token, loss = self._next_token()
            losses.append(loss)
            self._recorder.active = len(self.greedy) % RECORD_EVERY == 0
            began = time.perf_counter()
            self._logits = self._adapter.step(self._offloaded, token)
            self._adapter.synchronize()
            if not self._recorder.active:
                latencies.append(time.perf_counter() - began)
        counts = counts_since(before, self._offloaded.counts)
        correct = [self._is_correct(reply) for reply in self._judged_replies(first, length)]
        variance = cluster_variance(self._offloaded)
        return Segment(
            decode_tokens=length,
            steps=length - first,
            judged=len(correct),
            correct=sum(correct),
            nll=None if self._text.free_tokens else statistics.fmean(losses),
            quality=self._recorder.take_mean(),
            counts=asdict(counts),
            latency_s=statistics.median(latencies),
            clusters=variance and variance[1],
            variance=variance and variance[0],
        )

    def _next_token(self) -> tuple[int, float]:
        """Return the next token and its loss. A model that writes freely never ends the text."""
        text, place = self._text, len(self.greedy)
        logits = self._logits[0].float()
        if place < text.free_tokens:
            logits = logits.index_fill(
                0, torch.tensor(sorted(self._ends), dtype=torch.long, device=logits.device), float("-inf")
            )
        self.greedy.append(int(logits.argmax()))
        if place < text.free_tokens:
            return self.greedy[-1], 0.0
        token = text.token_ids[text.prompt_tokens + place - text.free_tokens]
        return token, float(logits.logsumexp(-1) - logits[token])

    def _judged_replies(self, first: int, end: int) -> list[Reply]:
        """Return the replies that end in a segment and whose evidence is far away."""
        shift = self._text.free_tokens - self._text.prompt_tokens
        ends = [reply.end + shift for reply in self._text.replies]
        in_segment = self._text.replies[bisect_left(ends, first + 1) : bisect_left(ends, end + 1)]
        return [reply for reply in in_segment if reply.is_far]

    def _is_correct(self, reply: Reply) -> bool:
        shift = self._text.free_tokens - self._text.prompt_tokens
        decoded = self.greedy[reply.value_start + shift : reply.end + shift]
        return tuple(decoded) == self._text.token_ids[reply.value_start : reply.end]
