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
        foretold: of these, tokens that an earlier answer foretold, behind which nothing was decoded.
        drafted: rows of the pass that checked what it foretold.
    """

    prompt: int
    exact: int = 0
    stale: int = 0
    recomputed: int = 0
    selecting: int = 0
    decoded: int = 0
    foretold: int = 0
    drafted: int = 0

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
        """The same of the rows behind the prompt: tokens that are fed back, and what was drafted."""
        behind = self.steps * (self.prompt + self.foretold) + _sum_to(self.steps)
        return behind + self.drafted * self.prompt + _sum_to(self.drafted)

    @property
    def steps(self) -> int:
        """Tokens that are fed back one by one: all that were not foretold, but the reply's last."""
        return max(0, self.decoded - 1 - self.foretold)


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
