"""Strategies that retrieve nothing: all entries, or the recent window alone."""

from kvweave.decode.strategy import SinkAttention, Strategy, TokenBudget


class DenseAttention(SinkAttention):
    """A retriever that leaves all entries in the window: dense attention through the same code."""

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Accept none."""
        return 0


WINDOW = Strategy(lambda layer, shared, hooks: SinkAttention())
DENSE = Strategy(lambda layer, shared, hooks: DenseAttention())
