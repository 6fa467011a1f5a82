"""What answering took, in tokens: the trace that prices are put on later. Knows no prices and no systems."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One prompt through the model and the reply behind it.

    Attributes:
        prompt: tokens of the prompt.
        exact: of these, tokens whose stored KV equals what would be computed.
        stale: of these, tokens whose KV was stored to stand anywhere.
        recomputed: of the stale ones, those that were computed anyway.
        selecting: rows that were run over stale KV to choose these.
        decoded: tokens of the reply.
    """

    prompt: int
    exact: int = 0
    stale: int = 0
    recomputed: int = 0
    selecting: int = 0
    decoded: int = 0

    @property
    def rows(self) -> int:
        """Rows that ordinary reuse computes."""
        return self.prompt - self.exact - self.stale + self.recomputed

    @property
    def matched(self) -> int:
        """Tokens that are not computed."""
        return self.exact + self.stale - self.recomputed

    @property
    def keys(self) -> int:
        """How many keys the rows attend to, all together, in one layer.

        Exact tokens stand in front, then stale ones, then fresh ones; recomputed ones are taken as spread evenly.
        """
        fresh = self.prompt - self.exact - self.stale
        behind = fresh * (self.prompt - fresh) + _sum_to(fresh)
        return behind + round(self.recomputed * (self.exact + (self.stale + 1) / 2))

    @property
    def selecting_keys(self) -> int:
        """The same of the rows that select, which stand at the prompt's end."""
        return self.selecting * (self.prompt - self.selecting) + _sum_to(self.selecting)

    @property
    def decoded_keys(self) -> int:
        """The same of the tokens that are fed back, all but the reply's last."""
        steps = max(0, self.decoded - 1)
        return steps * self.prompt + _sum_to(steps)


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
