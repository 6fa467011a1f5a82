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
        foretold: of these, tokens that a near question's answer or the prompt told, and that stood.
        checks: rows of each pass that ran the reply's last token with what was told to follow it.
    """

    prompt: int
    exact: int = 0
    stale: int = 0
    recomputed: int = 0
    selecting: int = 0
    decoded: int = 0
    accepted_draft_tokens: int = 0
    checks: tuple[int, ...] = ()

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
        """The same of the rows behind the prompt: tokens that are fed back one by one, and those of checks.

        Checks are taken as standing where the reply begins.
        """
        behind = self.steps * (self.prompt + self.checked) + _sum_to(self.steps)
        return behind + sum(rows * self.prompt + _sum_to(rows) for rows in self.checks)

    @property
    def steps(self) -> int:
        """Tokens that are fed back one by one: all that were neither told nor ran with what was, but the reply's last."""
        return max(0, self.decoded - 1 - self.checked)

    @property
    def checked(self) -> int:
        """Tokens of the reply that ran in checks: those that stood, and the one before them in each."""
        return self.accepted_draft_tokens + len(self.checks)


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2
