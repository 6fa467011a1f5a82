"""What a layer's retrieval leaves out, told from outside: everything it takes in is kept beside it, in memory.

Stands in front of a retriever and passes everything on to it. In steps that are looked at, the exact attention over all
that the retriever holds is computed beside its own. Tensor letters: G KV heads, R query rows of a head's group,
n entries, D head width.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.retriever import Retriever, TokenBudget
from kvweave.ops.partial_attention import PartialAttention
from kvweave_lab.eval.decoding.outcome import Watched
from kvweave_lab.eval.decoding.returning import Returns

_SAME = 1 - 1e-4  # the same logit, summed in another order, gives almost the same weight


@dataclass(slots=True)
class Look:
    """Whether the step that comes is looked at, and what was seen in all layers of those that were."""

    now: bool = False
    found: list[Watched] = field(default_factory=list)

    def take(self) -> Watched | None:
        """The mean of what was seen, forgotten here; None if nothing was."""
        seen, self.found = self.found, []
        if not seen:
            return None
        sums = [(one.recall, one.attended_mass, one.output_error) for one in seen]
        recall, mass, error = torch.tensor(sums, dtype=torch.float64).mean(0).tolist()
        return Watched(recall, mass, error)


class StoreEntry:
    """Entries in the order they came, keys and values (2, G, n, D), in memory that grows by doubling."""

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

    def held(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (G, n, D); None before there are any."""
        if self._rows is None:
            return None
        return self._rows[0, :, : self._count], self._rows[1, :, : self._count]


class WatchedRetriever:
    """A retriever, and beside it what it was given.

    What is seen of a step: *recall*, of the exact best entries behind the window, as many as the step may retrieve,
    the share that was attended to; *attended mass*, the share of the softmax over everything that attended entries
    have, on the mean over heads; *output error*, the distance of the layer's attention output from the exact one, as a share
    of its length. Best are those whose weights, summed over the query heads that share a KV head, are the largest.
    """

    def __init__(self, inner: Retriever, look: Look, returns: Returns | None) -> None:
        self.inner, self.kept = inner, StoreEntry()
        self._look, self._returns = look, returns

    @property
    def when_read(self) -> Callable[[], None]:
        """The inner retriever's."""
        return self.inner.when_read

    @when_read.setter
    def when_read(self, then: Callable[[], None]) -> None:
        self.inner.when_read = then

    @property
    def resident_bytes(self) -> int:
        """The inner retriever's: what is kept for comparison is not part of decoding."""
        return self.inner.resident_bytes

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """As the inner one."""
        self.kept.append(keys, values)
        self.inner.fill(keys, values, queries)

    def add(self, keys: Tensor, values: Tensor, allowed: TokenBudget) -> None:
        """As the inner one."""
        self.kept.append(keys, values)
        self.inner.add(keys, values, allowed)

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """As the inner one."""
        return self.inner.wanted(waiting, allowed)

    def begin(self) -> None:
        """As the inner one."""
        self.inner.begin()

    def ahead(self) -> None:
        """As the inner one."""
        self.inner.ahead()

    def settle(self, allowed: TokenBudget) -> None:
        """As the inner one."""
        self.inner.settle(allowed)

    def attend(self, attention: PartialAttention, left: int) -> int:
        """As the inner one, and look at it if the step is looked at."""
        held = self.kept.held()
        if not self._look.now:
            attended = self.inner.attend(attention, left)
        elif held is None:  # everything is in the window: nothing can be missed
            attended = self.inner.attend(attention, left)
            self._look.found.append(Watched(1.0, 1.0, 0.0))
        else:
            exact = _Exact(attention, held, left)
            attended = self.inner.attend(_Shown(attention, exact.see), left)
            self._look.found.append(exact.compared(attention))
        if self._returns is not None and isinstance(self.inner, ClusterRetriever):
            self._returns.step(self.inner.table.sizes, [own.tolist() for own in self.inner.chosen])
        return attended


def watch(held: OffloadedCache, look: Look, seed: int) -> list[Returns]:
    """Stand in front of every layer's retriever, before anything is filled in; returns the counts of clusters seen again."""
    found = []
    for index, layer in enumerate(held.layers):
        if isinstance(layer.retriever, ClusterRetriever):
            found.append(Returns(f"{seed}/{index}"))
            layer.retriever = WatchedRetriever(layer.retriever, look, found[-1])
        else:
            layer.retriever = WatchedRetriever(layer.retriever, look, None)
    return found


class _Shown(PartialAttention):
    """Passes what is added on to another attention and shows its logits; keeps no sums of its own."""

    def __init__(self, to: PartialAttention, see: Callable[[Tensor], None]) -> None:
        self.query, self.softcap = to.query, to.softcap
        self._to, self._see = to, see

    @property
    def log_mass(self) -> Tensor:
        """The other's."""
        return self._to.log_mass

    def add_weighed(self, logits: Tensor, values: Tensor) -> None:
        """Show the logits, then add."""
        self._see(logits)
        self._to.add_weighed(logits, values)


class _Exact:
    """Attention to everything: to what `attention` has seen already and to all entries behind the window."""

    def __init__(self, attention: PartialAttention, held: tuple[Tensor, Tensor], left: int) -> None:
        keys, values = (part.to(attention.query.device) for part in held)
        self._whole = copy(attention)  # adding replaces its sums, so that the other's stay
        logits = attention.logits(keys)  # (G, R, n)
        self._mass = logits.logsumexp(-1, keepdim=True)
        weights = (logits - self._mass).exp().sum(1)  # (G, n)
        self._count = min(left, weights.shape[1])
        self._least = weights.topk(self._count).values[:, -1:] if self._count else weights[:, :1]  # (G, 1)
        self._hits = torch.zeros(weights.shape[0], device=weights.device)
        self._whole.add_weighed(logits, values)

    def see(self, logits: Tensor) -> None:
        """Count those of some attended entries, by their logits (G, R, m), that are among the best."""
        weights = (logits - self._mass).exp().sum(1)
        best = (weights >= self._least * _SAME) & logits.isfinite().any(1)
        self._hits += best.sum(1)

    def compared(self, attention: PartialAttention) -> Watched:
        """With the attention that was retrieved for."""
        recall = (
            (self._hits.clamp(max=self._count) / self._count).mean() if self._count else torch.tensor(1.0)
        )
        mass = (attention.log_mass - self._whole.log_mass).exp().clamp(max=1.0).mean()
        exact, own = self._whole.result().float(), attention.result().float()
        error = (own - exact).norm() / exact.norm().clamp(min=1e-30)
        return Watched(float(recall), float(mass), float(error))
