"""What a layer's update is about to replace in the canvas: new keys and values beside the ones held so far.

Whoever watches updates can compare the two and end the pass when it has seen enough (CacheBlend, KVShare). Knows
nothing of what is made of the comparison.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StopForward(Exception):
    """Raised by a watch to end the pass it looks at; what the layer was about to write is dropped."""


@dataclass(frozen=True, slots=True)
class Update:
    """One layer's new rows before they are written, all (G, T, D), keys rotated; to be read only.

    They stand at prompt positions `rows` (T,), ascending. `stale_keys` and `stale_values` are what the canvas
    holds there: zeros where it holds nothing yet.
    """

    layer: int
    rows: Tensor
    keys: Tensor
    values: Tensor
    stale_keys: Tensor
    stale_values: Tensor


class UpdateHook(Protocol):
    """Something that looks at what a pass replaces, layer by layer."""

    def see(self, update: Update) -> None:
        """Called once per layer, in order, before the rows are written; may raise StopForward to end the pass."""
        ...
