"""Who a canvas hands its layers over to, so that a prompt's KV never stands in memory as a whole.

Knows nothing of where the layers go.
"""

from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowWatch


class LayerTaker(RowWatch, Protocol):
    """Takes a prompt's KV over, layer by layer, from the pass that it watches; see `Canvas.hand_over`."""

    @property
    def bounded(self) -> bool:
        """Whether KV of other layers may not be held beside what it takes, not even to be stored."""
        ...

    def begin(self, positions: Tensor) -> None:
        """A prompt at rotary positions (N,) comes; of one that came before and was given up, nothing counts."""
        ...

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy a layer's keys and values (G, N, D), with which the canvas is done.

        A layer that was not seen in this pass is of no use: whoever looked at the prompt beforehand has left it.
        """
        ...
