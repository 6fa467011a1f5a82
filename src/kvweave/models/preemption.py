"""Passes of low priority: they stop between two layers when the model is needed elsewhere, and resume afterwards.

A prefill runs in blocks of rows. So one layer of one pass is short, and only the block that was stopped is computed
again. Knows neither the other users of the model nor what the passes are for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.models.attention import RowPlan
from kvweave.models.quantised import quantised_modules
from kvweave.models.support import Geometry

BLOCK_TOKENS: Final = 32
"""Rows of a block: few, so that one layer of it is short, but enough to be worth reading the weights."""

RunRows = Callable[[RowPlan, int | Tensor], Tensor]
"""One call of the model over a plan's rows; the second argument says which rows' logits to return, (kept, vocab)."""


class Preemption(Protocol):
    """Decides when passes of low priority stop."""

    def stop_requested(self) -> bool:
        """Whether the model is needed elsewhere now; asked before every layer, so it must be quick."""
        ...

    def wait_for_requests(self) -> None:
        """Return when a stopped pass may resume, or raise to give it up; called without any lock."""
        ...

    def record_flops(self, flops: int) -> None:
        """Called after every pass with its cost."""
        ...


class Preempted(Exception):
    """A pass was stopped that cannot be resumed: the caller has to start the work that it belongs to again."""


class _Stopped(Exception):
    """Raised between two layers."""


class PassLock:
    """The lock of a model: one pass at a time, and none of low priority while another one waits.

    A plain lock would not do. A thread that releases one and takes it again at once is faster than a thread that waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._waiting = 0  # passes that are not of low priority
        self._holder: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether a pass that is not of low priority waits."""
        return self._waiting > 0

    @contextmanager
    def held(self, *, low: bool) -> Iterator[None]:
        """Hold the lock, unless this thread does already; `low` lets the passes that wait and are not go first."""
        if self._holder == threading.get_ident():
            yield
            return
        with self._changed:
            if low:
                self._changed.wait_for(lambda: not self.wanted)
            else:
                self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            if not low:
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
        try:
            self._holder = threading.get_ident()
            yield
        finally:
            self._holder = None
            self._lock.release()


class LowPriority:
    """Runs passes that stop when `preemption` asks for it; arguments as for `Adapter.low_priority`."""

    def __init__(
        self,
        layers: list[nn.Module],
        cost: "PassCost",
        preemption: Preemption,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._layers = layers
        self._cost = cost
        self._preemption = preemption
        self._block_tokens = block_tokens

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For the length of one call of the model, which the caller has locked, let it stop before every layer."""
        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.callback(layer.register_forward_pre_hook(self._before_layer).remove)
            yield

    def prefill(self, run: RunRows, plan: RowPlan, *, in_blocks: bool, resumable: bool) -> Tensor:
        """Run a plan's rows in blocks or in one piece, and return the logits of the last row, (1, vocab).

        A pass that is not `resumable` has shown some layers to hooks when it stops: raises Preempted then.
        """
        blocks = [plan.subset(rows) for rows in plan.rows.split(self._block_tokens)] if in_blocks else [plan]
        no_logits = torch.empty(0, dtype=torch.long, device=plan.rows.device)
        for block in blocks[:-1]:
            self._run_to_end(partial(run, block, no_logits), block.rows, 0)
        last = blocks[-1]
        return self._run_to_end(partial(run, last, 1), last.rows, 1, resumable=resumable)

    def append(
        self, run: Callable[[], Tensor], undo: Callable[[], None] | None, rows: Tensor, logits: int
    ) -> Tensor:
        """Run a pass over appended rows (T,), usually a decoding step, and return the logits of the last `logits` rows.

        `undo` removes what a stopped pass has appended. Without it the pass can stop only before it begins. The cost is
        that of attention to everything before the rows.
        """
        if undo is None:
            if self._preemption.stop_requested():
                self._preemption.wait_for_requests()
            return self._run_to_end(run, rows, logits, resumable=False)
        return self._run_to_end(run, rows, logits, undo=undo)

    def _run_to_end(
        self,
        run: Callable[[], Tensor],
        rows: Tensor,
        logits: int,
        *,
        resumable: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Run a pass, from its start again after each stop, until it is complete."""
        while True:
            try:
                result = run()
            except _Stopped:
                undo()
                self._preemption.wait_for_requests()
                if not resumable:
                    raise Preempted from None
            else:
                self._preemption.record_flops(self._cost.flops(rows, logits))
                return result

    def _before_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._preemption.stop_requested():
            raise _Stopped


# The cost of a pass: floating-point operations, counted from the model's shape


@dataclass(frozen=True, slots=True)
class PassCost:
    """Counts a decoder's multiplications and additions: two per weight that a row is multiplied with, without norms and the like.

    Attributes:
        per_row: operations of one row through all layers, without attention itself.
        per_key: operations of one row's attention to one key, in one layer.
        per_logits: operations of one row's logits.
        windows: each layer's sliding window; None if the layer attends to everything before a row.
    """

    per_row: int
    per_key: int
    per_logits: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, geometry: Geometry) -> Self:
        """Read a model's shape. Of a mixture of experts, count the experts that one row goes to."""
        config: Any = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        return cls(
            per_row=2 * _weights_per_row(model, config),
            per_key=4 * config.num_attention_heads * geometry.head_width,
            per_logits=2 * head.weight.numel() if head is not None else 0,
            windows=geometry.windows or (None,) * geometry.layers,
        )

    def flops(self, rows: Tensor, logits: int) -> int:
        """Return the operations of a pass over prompt positions `rows` (T,) that makes the logits of `logits` rows.

        Each row attends up to itself.
        """
        keys = rows.to("cpu", torch.long) + 1
        seen = sum(int((keys if window is None else keys.clamp(max=window)).sum()) for window in self.windows)
        return self.per_row * rows.numel() + self.per_key * seen + self.per_logits * logits


def _weights_per_row(model: PreTrainedModel, config: Any) -> int:
    """Count the weights of the decoder layers that each row is multiplied with."""
    used: int | None = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts: int | None = next((found for name in names if (found := getattr(config, name, None))), None)
    share = used / experts if used and experts else 1.0
    count = 0.0
    packed = ((f"{name}.weight", module.weight) for name, module in quantised_modules(model).items())
    weights: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(packed)}
    for name, weight in weights.items():
        if ".layers." not in f".{name}" or weight.dim() < 2:
            continue
        count += weight.numel() * (share if ".experts." in name else 1)
    return round(count)
