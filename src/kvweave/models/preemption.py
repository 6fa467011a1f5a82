"""Passes of low priority: they stop between two layers when somebody else is to have the model, and go on afterwards.

A prefill runs in blocks of rows, so that one layer of one pass is short, and only the block that was stopped is
computed again. Knows neither who else there is nor what the passes are for.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from kvweave.models.attention import RowPlan
from kvweave.models.flops import PassCost

BLOCK_TOKENS: Final = 32
"""Rows of a block: few, so that one layer of it is short, and yet enough that weights are not read for a handful."""

Once = Callable[[RowPlan, int | Tensor], Tensor]
"""One call of the model over a plan's rows, and which rows' logits are made: logits (kept, vocab)."""


class Preemption(Protocol):
    """Decides when passes of low priority give way."""

    def wanted(self) -> bool:
        """Whether somebody else is to have the model now; asked before every layer, so it must be quick."""
        ...

    def give_way(self) -> None:
        """Called without any lock when a pass was stopped; returns when it may go on, or raises to give it up."""
        ...

    def ran(self, flops: int) -> None:
        """Told after every pass what it took."""
        ...


class Preempted(Exception):
    """A pass was stopped that cannot go on from where it was: what it belongs to has to begin again."""


class _Stopped(Exception):
    """Raised between two layers."""


class LowPriority:
    """Runs passes that give way to others.

    Args:
        layers: the model's decoder layers.
        cost: what its passes cost.
        preemption: who decides.
        block_tokens: how many rows run at once, at least 1.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        cost: PassCost,
        preemption: Preemption,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._layers = layers
        self._cost = cost
        self._preemption = preemption
        self._block_tokens = block_tokens

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """For the length of one call, which the caller has locked the model for, it can be stopped at every layer."""
        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.callback(layer.register_forward_pre_hook(self._before).remove)
            yield

    def prefill(self, once: Once, plan: RowPlan, *, whole: bool, watched: bool) -> Tensor:
        """Run a plan's rows in blocks, or as a `whole`: logits of the last row, (1, vocab).

        One that is `watched` runs as a whole too, and when it was stopped it cannot go on, since what watches it has
        seen some layers already: raises Preempted.
        """
        whole = whole or watched
        blocks = [plan] if whole else [plan.narrowed(rows) for rows in plan.rows.split(self._block_tokens)]
        nothing = torch.empty(0, dtype=torch.long, device=plan.rows.device)
        for block in blocks[:-1]:
            self._through(partial(once, block, nothing), block.rows, 0, again=True)
        last = blocks[-1]
        return self._through(partial(once, last, 1), last.rows, 1, again=not watched)

    def append(
        self, once: Callable[[], Tensor], undo: Callable[[], None] | None, rows: Tensor, logits: int
    ) -> Tensor:
        """A pass over appended rows (T,), a decoding step mostly, that makes the logits of so many; `undo` takes back what
        a stopped one has appended.

        One that cannot be taken back (None) gives way before it begins; it counts as if it attended to everything.
        """
        if undo is None:
            if self._preemption.wanted():
                self._preemption.give_way()
            return self._through(once, rows, logits, again=False)
        return self._through(once, rows, logits, again=True, undo=undo)

    def _through(
        self,
        once: Callable[[], Tensor],
        rows: Tensor,
        logits: int,
        *,
        again: bool,
        undo: Callable[[], None] = lambda: None,
    ) -> Tensor:
        while True:
            try:
                found = once()
            except _Stopped:
                undo()
                self._preemption.give_way()
                if not again:
                    raise Preempted from None
            else:
                self._preemption.ran(self._cost.pass_over(rows, logits))
                return found

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._preemption.wanted():
            raise _Stopped
