"""A session's accounts priced: seconds, operations and bytes of each request under one kind of reuse.

Table A prices projection reuse: every token is run through every layer, and only the projections of tokens whose KV is
stored are skipped. Table B prices ordinary reuse: stored tokens are not run. Hits and answers are the same in both, since
both are exact where stored KV is; in A, reuse of stale KV is priced and was never run so. Knows no systems' insides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from kvweave_lab.eval.personas.costs import Costs
from kvweave_lab.eval.personas.passes import Pass
from kvweave_lab.eval.personas.served import Served, Session
from kvweave_lab.eval.personas.shape import Shape
from kvweave_lab.eval.personas.systems import Projections, System

Table: TypeAlias = Literal["A", "B"]
TABLES: Final[tuple[Table, ...]] = ("A", "B")
"""Projection reuse, and ordinary reuse."""


@dataclass(frozen=True, slots=True)
class Priced:
    """One request: seconds from question to whole answer, and operations for it."""

    latency_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Puts prices on sessions."""

    costs: Costs
    shape: Shape

    def requests(self, session: Session, system: System, table: Table) -> list[Priced]:
        """Every request of a session, in order."""
        return [self.request(served, system, table) for served in session.served]

    def request(self, served: Served, system: System, table: Table) -> Priced:
        """One request: vector, bank, search, stored KV, prefill, decoding, as far as it went."""
        costs = self.costs
        seconds = costs.embed_s + (costs.match_s if system.matching != "none" else 0.0)
        took = served.took
        if took is None:
            return Priced(seconds, 0.0)
        if not system.foretells:
            took = replace(took, accepted_draft_tokens=0, checks=())
        seconds += costs.retrieve_s
        if system.kv != "none":
            seconds += costs.find_kv_s + self.load_s(took, kept(system, table))
        seconds += self.prefill_s(took, system, table) + self.decode_s(took)
        return Priced(seconds, self.flops(took, system, table))

    def load_s(self, took: Pass, projections: Projections) -> float:
        """Loading what is stored of a prompt."""
        return self.costs.load_s_per_byte * self.shape.stored_bytes(took.exact + took.stale, projections)

    def prefill_s(self, took: Pass, system: System, table: Table) -> float:
        """From assembled prompt to first logits."""
        costs, stored = self.costs, took.exact + took.stale
        selecting = costs.select(took.selecting, stored) if took.selecting else 0.0
        if table == "B":
            return selecting + costs.prefill(took.rows, stored)
        skipped = costs.projected(took.matched, system.projections)
        return selecting + max(0.0, costs.prefill(took.prompt, 0) - skipped)

    def decode_s(self, took: Pass) -> float:
        """From first logits to the end of the reply: passes that check what is told, and a step for every other token.

        The last token is fed back too, to see the end; where a check told that, it is one of what stood.
        """
        checks_s = sum(self.costs.check(rows, took.prompt) for rows in took.checks)
        single = max(0, took.decoded - took.checked)
        return checks_s + self.costs.decode(took.prompt + took.checked, single)

    def flops(self, took: Pass, system: System, table: Table) -> float:
        """Operations of a request."""
        if table == "A":
            return self.shape.projection_reuse_flops(took, system.projections)
        return self.shape.flops(took)

    def stored_bytes(self, session: Session, system: System, table: Table) -> int:
        """What lies stored at the end: answers, and KV with what table A keeps beside it."""
        return session.held.answer_bytes + self.shape.stored_bytes(
            session.held.kv_tokens, kept(system, table)
        )


def kept(system: System, table: Table) -> Projections:
    """What an entry holds."""
    return system.projections if table == "A" else "KV"


def tail(seconds: Sequence[float], share: float = 0.95) -> float:
    """The time within which that share of requests has its answer."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
