"""One long text decoded under one variant, step by step as a user's would be, and watched.

The prompt is prefilled once and filled into every variant's KV. Knows nothing of what is compared.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvweave.decode.handoff import MOST_QUERY_ROWS
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.generation import end_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.attention import LayerQueries
from kvweave_lab.eval.decoding.outcome import Run, Stretch
from kvweave_lab.eval.decoding.partition import variance
from kvweave_lab.eval.decoding.returning import together
from kvweave_lab.eval.decoding.watching import Look, watch
from kvweave_lab.eval.longtext.telling import LongText, Reply

LOOK_EVERY = 8
"""Steps of which one is looked at: exact attention beside the retrieved one costs as much as dense decoding."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A text's prompt: what a variant is filled with, layer by layer, and the logits (1, vocab) behind it."""

    text: LongText
    layers: "_Layers"
    logits: Tensor

    @classmethod
    def of(cls, adapter: Adapter, text: LongText) -> "Prefilled":
        """Computed in full."""
        ids = text.token_ids[: text.prompt_tokens]
        kv_cache, layers = adapter.new_cache(len(ids)), _Layers()
        kv_cache.hand_over(layers)
        plan = adapter.rows(torch.arange(len(ids)))
        plan.hooks.append(layers)
        return cls(text, layers, adapter.compute(kv_cache, ids, plan))

    @property
    def retrieving(self) -> list[int]:
        """The layers without a window of their own."""
        return [index for index, (*_, window) in enumerate(self.layers.taken) if window is None]

    def fill(self, held: OffloadedCache) -> None:
        """Give a copy to a variant."""
        for index, (keys, values, queries, window) in enumerate(self.layers.taken):
            held.fill(index, keys, values, queries, window)


class _Layers:
    """Keeps what the layers of a prompt hand over: keys and values (G, N, D), the last rows' queries, the window."""

    bounded = False

    def __init__(self) -> None:
        self.taken: list[tuple[Tensor, Tensor, Tensor, int | None]] = []

    def begin(self, positions: Tensor) -> None:
        """There is one prompt."""

    def see(self, queries: LayerQueries) -> None:
        self._asked = queries.query[0, :, -MOST_QUERY_ROWS:].clone(), queries.window

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.taken.append((keys, values, *self._asked))  # nobody else has them any more


def decode(
    adapter: Adapter,
    prefilled: Prefilled,
    variant: str,
    settings: OffloadSettings,
    lengths: Sequence[int],
    at_length: Callable[[int, OffloadedCache], None] = lambda length, held: None,
) -> Run:
    """Decode the text to the last of `lengths` under `settings`, which `variant` is the name of.

    `at_length` is shown the KV wherever a stretch ends. Raises InvalidRequest where memory is too little, StoreError
    and StoreFull for the disk.
    """
    text, seen = prefilled.text, Look()
    with OffloadedCache(adapter.geometry, settings, torch.arange(text.prompt_tokens)) as held:
        returns = watch(held, seen, text.seed)
        prefilled.fill(held)
        course = _Course(adapter, prefilled, held, seen)
        stretches = []
        for length in lengths:
            stretches.append(course.to(length))
            at_length(length, held)
    return Run(
        text=text.name,
        task=text.task,
        seed=text.seed,
        variant=variant,
        storage=settings.storage,
        budget=settings.kv_budget,
        prompt_tokens=text.prompt_tokens,
        forced=not text.free_tokens,
        greedy=tuple(course.greedy),
        stretches=tuple(stretches),
        updated=together([one.updated.again() for one in returns]),
        any=together([one.any.again() for one in returns]),
    )


class _Course:
    """The way through a text: where it is, and what greedy decoding would have said so far."""

    def __init__(self, adapter: Adapter, prefilled: Prefilled, held: OffloadedCache, seen: Look) -> None:
        self._adapter, self._held, self._seen = adapter, held, seen
        self._text = prefilled.text
        self._logits = prefilled.logits
        self._ends = end_tokens(adapter)
        self.greedy: list[int] = []

    def to(self, length: int) -> Stretch:
        """Go on until so many tokens are decoded."""
        before, first = self._held.counts.copy(), len(self.greedy)
        latencies, losses = [], []
        while len(self.greedy) < length:
            token, loss = self._next()
            losses.append(loss)
            self._seen.now = len(self.greedy) % LOOK_EVERY == 0
            began = time.perf_counter()
            self._logits = self._adapter.step(self._held, token)
            self._adapter.synchronize()
            if not self._seen.now:
                latencies.append(time.perf_counter() - began)
        counts = self._held.counts.since(before)
        right = [self._right(reply) for reply in self._judged(first, length)]
        grouped = variance(self._held)
        return Stretch(
            decode_tokens=length,
            steps=length - first,
            judged=len(right),
            right=sum(right),
            nll=None if self._text.free_tokens else statistics.fmean(losses),
            watched=self._seen.take(),
            counts=asdict(counts),
            latency_s=statistics.median(latencies),
            clusters=grouped and grouped[1],
            variance=grouped and grouped[0],
        )

    def _next(self) -> tuple[int, float]:
        """The token that comes, and what the model held of it; a model that writes by itself does not end."""
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

    def _judged(self, first: int, end: int) -> list[Reply]:
        """Replies that end in a stretch and whose evidence is far away."""
        shift = self._text.free_tokens - self._text.prompt_tokens
        ends = [reply.end + shift for reply in self._text.replies]
        some = self._text.replies[bisect_left(ends, first + 1) : bisect_left(ends, end + 1)]
        return [reply for reply in some if reply.far]

    def _right(self, reply: Reply) -> bool:
        shift = self._text.free_tokens - self._text.prompt_tokens
        said = self.greedy[reply.judged + shift : reply.end + shift]
        return tuple(said) == self._text.token_ids[reply.judged : reply.end]
