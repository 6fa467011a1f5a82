"""Prices of a session's requests: seconds, operations and bytes under one kind of reuse.

Table A prices projection reuse: every token runs through every layer, and only the projections of tokens with stored KV
are skipped. Table B prices ordinary reuse: stored tokens are not computed. Hits and answers are the same in both tables,
since exact KV does not change an answer. Table A prices the reuse of stale KV too, although it was never run that way.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self, TypeAlias

from kvweave.models.adapter import Adapter
from kvweave.models.preemption import PassCost
from kvweave_lab.eval.personas.costs import PROJECTIONS, Costs, projections_of
from kvweave_lab.eval.personas.model import ModelPass
from kvweave_lab.eval.personas.session import ServedQuestion, SessionRecord
from kvweave_lab.eval.personas.systems import Answers, Projections, System, Trial


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a model's shape that operations and bytes depend on.

    Attributes:
        cost: operations of passes.
        projected: operations of a row's projections through all layers, by projections.
        token_bytes: of a token's K and V in all layers.
        query_bytes: of a token's Q in all layers.
    """

    cost: PassCost
    projected: dict[Projections, int]
    token_bytes: int
    query_bytes: int

    @classmethod
    def of(cls, adapter: Adapter) -> Self:
        """Return the shape of a model with separate Q, K and V projections."""
        config: Any = adapter.model.config.get_text_config(decoder=True)
        geometry = adapter.geometry
        queries = geometry.layers * config.num_attention_heads * geometry.head_width
        return cls(
            PassCost.of(adapter.model, adapter.geometry),
            {
                name: 2 * sum(part.weight.numel() for part in projections_of(adapter, name))
                for name in PROJECTIONS
            },
            geometry.token_bytes,
            queries * geometry.dtype.itemsize,
        )

    def flops(self, model_pass: ModelPass) -> float:
        """Return the operations of a pass with ordinary reuse: stored tokens are not computed."""
        layers = len(self.cost.windows)
        decoded_rows = model_pass.steps + sum(model_pass.draft_passes)
        rows = model_pass.rows + model_pass.selection_rows + decoded_rows
        keys = model_pass.keys + model_pass.selection_keys + model_pass.decoded_keys
        return (
            self.cost.per_row * rows
            + self.cost.per_key * layers * keys
            + self.cost.per_logits * (1 + decoded_rows)
        )

    def projection_reuse_flops(self, model_pass: ModelPass, skipped: Projections) -> float:
        """Return the operations with projection reuse: stored tokens skip only their projections (PerCache §4.2.2)."""
        everything = replace(model_pass, exact=0, stale=0, recomputed=0, selection_rows=0)
        return self.flops(everything) - self.projected[skipped] * model_pass.reused

    def stored_bytes(self, tokens: int, projections: Projections) -> int:
        """Return the bytes of stored tokens with these projections."""
        return tokens * (self.token_bytes + (self.query_bytes if projections == "QKV" else 0))


Table: TypeAlias = Literal["A", "B"]
TABLES: Final[tuple[Table, ...]] = ("A", "B")
"""A: projection reuse, B: ordinary reuse."""


Decoding: TypeAlias = Literal["token", "lookup"]
DECODINGS: Final[tuple[Decoding, ...]] = ("token", "lookup")
"""How every system decodes: token by token, or with drafts from the prompt (prompt lookup), verified several at a time."""


@dataclass(frozen=True, slots=True)
class RequestPrice:
    """The price of one request: seconds from the question to the whole answer, and operations."""

    latency_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Computes the prices of sessions."""

    costs: Costs
    shape: Shape

    def requests(
        self, session: SessionRecord, system: System, table: Table, decoding: Decoding
    ) -> list[RequestPrice]:
        """Return the prices of a session's requests, in order."""
        return [self.request(served, system, table, decoding) for served in session.served]

    def request(
        self, served: ServedQuestion, system: System, table: Table, decoding: Decoding
    ) -> RequestPrice:
        """Return the price of one request: vector, answer cache, search, stored KV, prefill, decoding, as they apply."""
        costs = self.costs
        seconds = costs.embed_s + (costs.match_s if system.matching != "none" else 0.0)
        model_pass = served.model_pass
        if model_pass is None:
            return RequestPrice(seconds, 0.0)
        model_pass = decoded_by(model_pass, decoding)
        seconds += costs.retrieve_s
        if system.kv != "none":
            seconds += costs.find_kv_s + self.load_s(model_pass, stored_projections(system, table))
        seconds += self.prefill_s(model_pass, system, table) + self.decode_s(model_pass)
        return RequestPrice(seconds, self.flops(model_pass, system, table))

    def load_s(self, model_pass: ModelPass, projections: Projections) -> float:
        """Return the seconds of loading a prompt's stored KV."""
        return self.costs.load_s_per_byte * self.shape.stored_bytes(
            model_pass.exact + model_pass.stale, projections
        )

    def prefill_s(self, model_pass: ModelPass, system: System, table: Table) -> float:
        """Return the seconds from the assembled prompt to the first logits."""
        costs, stored = self.costs, model_pass.exact + model_pass.stale
        selecting = costs.select(model_pass.selection_rows, stored) if model_pass.selection_rows else 0.0
        if table == "B":
            return selecting + costs.prefill(model_pass.rows, stored)
        skipped = costs.projected(model_pass.reused, system.projections)
        return selecting + max(0.0, costs.prefill(model_pass.prompt, 0) - skipped)

    def decode_s(self, model_pass: ModelPass) -> float:
        """Return the seconds from the first logits to the end of the reply: verified drafts, and single steps.

        The last token is also fed back, which produces the end token, unless a draft's pass already did.
        """
        drafts_s = sum(self.costs.check(rows, model_pass.prompt) for rows in model_pass.draft_passes)
        single = max(0, model_pass.decoded - model_pass.draft_pass_tokens)
        return drafts_s + self.costs.decode(model_pass.prompt + model_pass.draft_pass_tokens, single)

    def flops(self, model_pass: ModelPass, system: System, table: Table) -> float:
        """Return the operations of a request."""
        if table == "A":
            return self.shape.projection_reuse_flops(model_pass, system.projections)
        return self.shape.flops(model_pass)

    def stored_bytes(self, session: SessionRecord, system: System, table: Table) -> int:
        """Return the bytes stored at the end: answers, and KV with the projections that the table stores."""
        return session.stored.answer_bytes + self.shape.stored_bytes(
            session.stored.kv_tokens, stored_projections(system, table)
        )


def decoded_by(model_pass: ModelPass, decoding: Decoding) -> ModelPass:
    """Return the pass with the reply decoded so; the recorded one counts drafts."""
    if decoding == "lookup":
        return model_pass
    return replace(model_pass, accepted_draft_tokens=0, draft_passes=())


def stored_projections(system: System, table: Table) -> Projections:
    """Return the projections that an entry stores."""
    return system.projections if table == "A" else "KV"


def tail_latency(seconds: Sequence[float], share: float = 0.95) -> float:
    """Return the time within which this share of the requests is answered."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Mean seconds of an operation, or mean bytes of an item; the other value is None. Replies are short or long."""

    answers: Answers
    name: str
    seconds: float | None
    bytes: float | None


def operation_rows(
    trial: Trial,
    sessions: Sequence[SessionRecord],
    prices: Prices,
    chunk_tokens: float,
    chunk_bytes: float,
) -> list[OperationRow]:
    """Return the seconds of operations and the bytes of items in the sessions of one trial (PerCache's Table 1).

    Means are over the questions that needed the operation. `chunk_tokens` are a chunk's tokens in a prompt,
    `chunk_bytes` the bytes of its text.
    """
    costs, shape, system = prices.costs, prices.shape, trial.system
    passes = [
        served.model_pass
        for session in sessions
        for served in session.served
        if served.model_pass is not None
    ]
    entries = sum(session.stored.questions for session in sessions)
    answer_bytes = sum(session.stored.answer_bytes for session in sessions)

    def mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    return [
        OperationRow(trial.answers, "matching a question", costs.embed_s + costs.match_s, None),
        OperationRow(trial.answers, "finding chunks", costs.retrieve_s, None),
        OperationRow(trial.answers, "matching stored KV", costs.find_kv_s, None),
        OperationRow(
            trial.answers,
            "loading stored KV",
            mean([prices.load_s(model_pass, "KV") for model_pass in passes]),
            None,
        ),
        OperationRow(
            trial.answers,
            "prefill without reuse",
            mean([costs.prefill(model_pass.prompt, 0) for model_pass in passes]),
            None,
        ),
        OperationRow(
            trial.answers,
            "prefill",
            mean([prices.prefill_s(model_pass, system, "B") for model_pass in passes]),
            None,
        ),
        OperationRow(
            trial.answers,
            "decoding",
            mean([costs.decode(model_pass.prompt, model_pass.decoded) for model_pass in passes]),
            None,
        ),
        OperationRow(
            trial.answers, "question in the bank", None, answer_bytes / entries if entries else None
        ),
        OperationRow(trial.answers, "text of a chunk", None, chunk_bytes),
        OperationRow(
            trial.answers, "K and V of a chunk", None, shape.stored_bytes(round(chunk_tokens), "KV")
        ),
        OperationRow(
            trial.answers, "Q, K and V of a chunk", None, shape.stored_bytes(round(chunk_tokens), "QKV")
        ),
    ]
