"""What each operation takes and each item weighs, as in PerCache's Table 1: from the measured costs and the sessions."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave_lab.eval.personas.pricing import Prices
from kvweave_lab.eval.personas.served import Session
from kvweave_lab.eval.personas.systems import System


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation's mean seconds, or an item's mean bytes; the other one is None."""

    name: str
    seconds: float | None
    bytes: float | None


def operation_rows(
    sessions: Sequence[Session], system: System, prices: Prices, chunk_tokens: float, chunk_bytes: float
) -> list[OperationRow]:
    """Rows for the sessions of one system; operations that answering took are means over questions that took one.

    `chunk_tokens` and `chunk_bytes` are of a chunk: its tokens in a prompt, and its text.
    """
    costs, shape = prices.costs, prices.shape
    passes = [served.took for session in sessions for served in session.served if served.took is not None]
    entries = sum(session.held.questions for session in sessions)
    cache_hit = sum(session.held.answer_bytes for session in sessions)

    def mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    return [
        OperationRow("matching a question", costs.embed_s + costs.match_s, None),
        OperationRow("finding chunks", costs.retrieve_s, None),
        OperationRow("matching stored KV", costs.find_kv_s, None),
        OperationRow("loading stored KV", mean([prices.load_s(took, "KV") for took in passes]), None),
        OperationRow("prefill without reuse", mean([costs.prefill(took.prompt, 0) for took in passes]), None),
        OperationRow("prefill", mean([prices.prefill_s(took, system, "B") for took in passes]), None),
        OperationRow("decoding", mean([costs.decode(took.prompt, took.decoded) for took in passes]), None),
        OperationRow("question in the bank", None, cache_hit / entries if entries else None),
        OperationRow("text of a chunk", None, chunk_bytes),
        OperationRow("K and V of a chunk", None, shape.stored_bytes(round(chunk_tokens), "KV")),
        OperationRow("Q, K and V of a chunk", None, shape.stored_bytes(round(chunk_tokens), "QKV")),
    ]
