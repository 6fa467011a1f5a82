"""Records what a layer's retrieval misses: a wrapper around a retriever that keeps a copy of all entries in memory.

In recorded steps, exact attention over everything that the retriever holds is computed in addition to its own. Also
recorded is whether clusters that were just updated are retrieved soon after (DynaKV table 2), compared with randomly drawn
ones. Tensor letters: G KV heads, R query rows of a head's group, n entries, D head width.
"""

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.strategy import Retriever, TokenBudget
from kvweave.ops.partial_attention import PartialAttention
from kvweave_lab.eval.decoding.results import AFTER_STEPS, ClusterReuse, RetrievalQuality
from kvweave_lab.strategies.centroid import CentroidClusters


@dataclass(slots=True)
class Recorder:
    """Whether the next step is recorded, and the qualities of all layers in recorded steps."""

    active: bool = False
    qualities: list[RetrievalQuality] = field(default_factory=list)

    def take_mean(self) -> RetrievalQuality | None:
        """Return the mean of the recorded qualities and clear them; None if there are none."""
        taken, self.qualities = self.qualities, []
        if not taken:
            return None
        values = [(one.recall, one.attended_mass, one.output_error) for one in taken]
        recall, mass, error = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        return RetrievalQuality(recall, mass, error)


def attach_recorder(offloaded: OffloadedCache, recorder: Recorder, seed: int) -> "list[ReuseTracker]":
    """Wrap the retriever of every layer before anything is filled in; return the trackers of layers with clusters."""
    trackers = []
    for index, layer in enumerate(offloaded.layers):
        tracker = None
        if isinstance(layer.retriever, ClusterRetriever):
            tracker = ReuseTracker(f"{seed}/{index}")
            trackers.append(tracker)
        layer.retriever = RecordingRetriever(layer.retriever, recorder, tracker)
    return trackers


def unwrapped_retriever(offloaded: OffloadedCache, layer: int) -> object:
    """Return the retriever of a layer without its recorder."""
    retriever = offloaded.layers[layer].retriever
    return retriever.inner if isinstance(retriever, RecordingRetriever) else retriever


def cluster_variance(offloaded: OffloadedCache) -> tuple[float, float] | None:
    """Return the mean squared distance of keys to their centroids, and clusters per head: means over all heads.

    None where no layer has clusters. Entries that wait for a cluster do not count.
    """
    variances, counts = [], []
    for layer in range(len(offloaded.layers)):
        retriever = unwrapped_retriever(offloaded, layer)
        if isinstance(retriever, CentroidClusters) and not retriever.empty:
            sizes, of_clusters = retriever.table.sizes, retriever.variances.of
            variances += [
                float(np.average(of_clusters[head, : int((own > 0).sum())], weights=own[own > 0]))
                for head, own in enumerate(sizes)
            ]
            counts += (sizes > 0).sum(1).tolist()
    return (float(np.mean(variances)), float(np.mean(counts))) if variances else None


class EntryBuffer:
    """Keys and values (2, G, n, D) in the order they were added, in memory that grows by doubling."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._count = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Copy entries (G, n, D)."""
        rows = torch.stack([keys, values])
        end = self._count + rows.shape[2]
        if self._rows is None or end > self._rows.shape[2]:
            more = rows.new_empty(*rows.shape[:2], max(256, 2 * end), rows.shape[3])
            if self._rows is not None:
                more[:, :, : self._count] = self._rows[:, :, : self._count]
            self._rows = more
        self._rows[:, :, self._count : end] = rows
        self._count = end

    def entries(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values (G, n, D); None if nothing was added."""
        if self._rows is None:
            return None
        return self._rows[0, :, : self._count], self._rows[1, :, : self._count]


class RecordingRetriever(Retriever):
    """A retriever with a recorder and a copy of its entries.

    A recorded step has three measures. *Recall* is the share of the exact best entries outside the window, as many as
    the step may retrieve, that were attended to. *Attended mass* is the share of the softmax over everything that falls
    on attended entries, averaged over heads. *Output error* is the distance of the layer's attention output from the
    exact one, relative to its length. The best entries have the largest weights, summed over the query heads that share
    a KV head.
    """

    def __init__(self, inner: Retriever, recorder: Recorder, tracker: "ReuseTracker | None") -> None:
        self.inner, self.buffer = inner, EntryBuffer()
        self._recorder, self._tracker = recorder, tracker

    @property
    def resident_bytes(self) -> int:
        """Bytes of the inner retriever; the copy is not part of decoding."""
        return self.inner.resident_bytes

    @property
    def growth_bytes(self) -> int:
        """Those of the inner retriever."""
        return self.inner.growth_bytes

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Copy and forward."""
        self.buffer.append(keys, values)
        self.inner.fill(keys, values, queries)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Copy and forward."""
        self.buffer.append(keys, values)
        self.inner.add(keys, values, budget)

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Forward."""
        return self.inner.accepts(count, budget)

    def prefetch_index(self) -> None:
        """Forward."""
        self.inner.prefetch_index()

    def prefetch(self) -> None:
        """Forward."""
        self.inner.prefetch()

    def finish_pass(self, budget: TokenBudget) -> None:
        """Forward."""
        self.inner.finish_pass(budget)

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Forward, and record the step if the recorder is active."""
        entries = self.buffer.entries()
        if not self._recorder.active:
            attended = self.inner.attend(attention, limit)
        elif entries is None:  # everything is in the window, so nothing can be missed
            attended = self.inner.attend(attention, limit)
            self._recorder.qualities.append(RetrievalQuality(1.0, 1.0, 0.0))
        else:
            exact = _ExactAttention(attention, entries, limit)
            attended = self.inner.attend(_LogitTap(attention, exact.count_read), limit)
            self._recorder.qualities.append(exact.quality_of(attention))
        if self._tracker is not None and isinstance(self.inner, ClusterRetriever):
            self._tracker.step(self.inner.table.sizes, [own.tolist() for own in self.inner.selected])
        return attended


class _LogitTap(PartialAttention):
    """Forwards additions to another attention and passes their logits to a callback, if they are no estimates; has no sums."""

    def __init__(self, target: PartialAttention, on_logits: Callable[[Tensor], None]) -> None:
        self.query, self.softcap = target.query, target.softcap
        self._target, self._on_logits = target, on_logits

    @property
    def log_mass(self) -> Tensor:
        """The target's."""
        return self._target.log_mass

    def add_logits(self, logits: Tensor, values: Tensor) -> None:
        """Pass the logits to the callback, then forward."""
        self._on_logits(logits)
        self._target.add_logits(logits, values)

    def add_estimate(self, logits: Tensor, values: Tensor) -> None:
        """Forward."""
        self._target.add_logits(logits, values)


_TOLERANCE = 1 - 1e-4  # the same logit, summed in another order, gives almost the same weight


class _ExactAttention:
    """Attention over everything: what `attention` has already added, and all entries outside the window."""

    def __init__(self, attention: PartialAttention, entries: tuple[Tensor, Tensor], limit: int) -> None:
        keys, values = (part.to(attention.query.device) for part in entries)
        self._whole = copy(attention)  # adding replaces the copy's sums and leaves the original's
        logits = attention.logits(keys)  # (G, R, n)
        self._mass = logits.logsumexp(-1, keepdim=True)
        weights = (logits - self._mass).exp().sum(1)  # (G, n)
        self._count = min(limit, weights.shape[1])
        self._least = weights.topk(self._count).values[:, -1:] if self._count else weights[:, :1]  # (G, 1)
        self._hits = torch.zeros(weights.shape[0], device=weights.device)
        self._read_mass = attention.log_mass  # (G, R)
        self._whole.add_logits(logits, values)

    def count_read(self, logits: Tensor) -> None:
        """Count the attended entries with these logits (G, R, m), and those that are among the best."""
        self._read_mass = torch.logaddexp(self._read_mass, logits.logsumexp(-1))
        weights = (logits - self._mass).exp().sum(1)
        best = (weights >= self._least * _TOLERANCE) & logits.isfinite().any(1)
        self._hits += best.sum(1)

    def quality_of(self, attention: PartialAttention) -> RetrievalQuality:
        """Return the quality of the attention that was retrieved for."""
        recall = (
            (self._hits.clamp(max=self._count) / self._count).mean() if self._count else torch.tensor(1.0)
        )
        mass = (self._read_mass - self._whole.log_mass).exp().clamp(max=1.0).mean()
        exact, own = self._whole.result().float(), attention.result().float()
        error = (own - exact).norm() / exact.norm().clamp(min=1e-30)
        return RetrievalQuality(float(recall), float(mass), float(error))


_LAST_STEP = AFTER_STEPS[-1]


class ReuseTracker:
    """Tracks whether one layer's clusters are retrieved again; `seed` determines the randomly drawn ones."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._sizes: NDArray[np.int64] | None = None
        self.updated, self.drawn = _TrackedClusters(), _TrackedClusters()

    def step(self, sizes: NDArray[np.int64], chosen: Sequence[Sequence[int]]) -> None:
        """Process a step that chose these clusters of each head.

        Changes in `sizes` (G, C) since the step before show which clusters grew or were split.
        """
        before, self._sizes = self._sizes, sizes.copy()
        if before is not None:
            old = np.zeros_like(sizes)
            old[:, : before.shape[1]] = before
            for head, cluster in np.argwhere(sizes != old).tolist():
                self.updated.track(head, cluster)
                self.drawn.track(head, self._random.randrange(max(1, int((sizes[head] > 0).sum()))))
        retrieved = [frozenset(own) for own in chosen]
        self.updated.step(retrieved)
        self.drawn.step(retrieved)


class _TrackedClusters:
    """Tracked clusters, and counts of the steps after which each was first retrieved."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []  # head, cluster, steps since
        self._seen = 0
        self._after = [0] * (_LAST_STEP + 1)

    def track(self, head: int, cluster: int) -> None:
        self._open.append([head, cluster, 0])

    def step(self, chosen: Sequence[frozenset[int]]) -> None:
        still_open = []
        for one in self._open:
            head, cluster, _ = one
            one[2] += 1
            if cluster in chosen[head]:
                self._after[one[2]] += 1
                self._seen += 1
            elif one[2] == _LAST_STEP:
                self._seen += 1
            else:
                still_open.append(one)
        self._open = still_open

    def reuse(self) -> ClusterReuse:
        """Return the counts of the clusters that are no longer tracked."""
        return ClusterReuse(self._seen, tuple(sum(self._after[: steps + 1]) for steps in AFTER_STEPS))
