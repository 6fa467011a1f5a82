"""Text that a prompt stands behind and whose KV is held elsewhere: a conversation's earlier turns.

Knows nothing of where it is held, nor of how much of it a row attends to.
"""

from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowPlan


class EarlierText(Protocol):
    """What a prompt's canvas, on which it begins at row 0, has to know of the text before it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """The system prefix that it begins with, which stored KV of chunks was made behind."""
        ...

    def positions(self, count: int) -> Tensor:
        """The rotary positions (count,) of as many rows that follow it."""
        ...

    def plan(self, rows: Tensor) -> RowPlan:
        """How prompt positions (T,), ascending, attend: to this text, and causally to the prompt."""
        ...
