"""Slot 2, match: which stored KV stands for which span of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from kvweave.kvstore.keys import with_queries
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.request import OBSERVED, Matched, PrefillRequest
from kvweave.types import ChunkKV, KVProvenance, Span, SpanKind

NOTHING: frozenset[SpanKind] = frozenset()
SYSTEM: frozenset[SpanKind] = frozenset({"system"})
PATHS: frozenset[SpanKind] = frozenset({"system", "chunk"})


class Match(Protocol):
    """Looks stored KV up for every span; the answer lies within the prompt, one entry per span, in order."""

    @property
    def remembers(self) -> frozenset[SpanKind]:
        """Kinds of spans whose exact KV, computed in a request, is worth storing: later requests look for it."""
        ...

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """Look up and load; verified entries only. What is damaged or gone counts as absent."""
        ...

    @property
    def anywhere(self) -> bool:
        """Whether KV of chunks is taken wherever they stand: then it can be loaded before the prompt is made."""
        ...


@dataclass(frozen=True, slots=True)
class MatchNothing:
    """Every span is computed."""

    remembers: frozenset[SpanKind] = NOTHING
    anywhere: bool = False

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """All fresh."""
        return tuple(
            Matched(span, "fresh", _why_fresh(span, "this recipe reuses nothing"))
            for span in request.prompt.spans
        )


@dataclass(frozen=True, slots=True)
class MatchSystemThenChunk:
    """The system prefix exactly; chunks by content, wherever they stand."""

    remembers: frozenset[SpanKind] = SYSTEM
    anywhere: bool = True

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole prompt."""
        return _find(request, prepare, exact_chunks=False, any_chunks=True)


@dataclass(frozen=True, slots=True)
class MatchExactPath:
    """Only KV made behind exactly the same earlier spans (RAGCache's knowledge tree, PerCache §4.1.1).

    A node whose parent was evicted still equals full attention and is used: its rows depend on the text
    before them, not on whether that text's KV is still stored.
    """

    remembers: frozenset[SpanKind] = PATHS
    anywhere: bool = False

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole path."""
        return _find(request, prepare, exact_chunks=True, any_chunks=False)


@dataclass(frozen=True, slots=True)
class MatchExactPathWithQueries:
    """As MatchExactPath, among entries that hold queries too (PerCache §4.2.2); never others, nor they by others.

    Where a model could make no use of queries (see `Adapter.projections`) it is MatchExactPath.
    """

    remembers: frozenset[SpanKind] = PATHS
    anywhere: bool = False

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole path."""
        queries = request.adapter.projections is not None
        return _find(request, prepare, exact_chunks=True, any_chunks=False, queries=queries)


@dataclass(frozen=True, slots=True)
class MatchPathThenChunk:
    """The exact path first, then by content: nothing is recomputed that some entry can stand for."""

    remembers: frozenset[SpanKind] = PATHS
    anywhere: bool = True

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole prompt."""
        return _find(request, prepare, exact_chunks=True, any_chunks=True)


def _find(
    request: PrefillRequest, prepare: Prepare, *, exact_chunks: bool, any_chunks: bool, queries: bool = False
) -> tuple[Matched, ...]:
    spans = request.prompt.spans
    exact = [_exact_provenance(request, i, span, exact_chunks) for i, span in enumerate(spans)]
    if queries:
        exact = [provenance and with_queries(provenance) for provenance in exact]
    anywhere = [i for i, span in enumerate(spans) if any_chunks and span.kind == "chunk"]
    accepted = dict(zip(anywhere, prepare.accepted(request, anywhere), strict=True))
    wanted = []
    for number, (span, best) in enumerate(zip(spans, exact, strict=True)):
        provenances = [*([best] if best is not None else []), *accepted.get(number, ())]
        wanted.append((request.prompt.ids(span), provenances if span.tokens else []))
    found = request.store.find(request.adapter.fingerprint, wanted, request.lease)
    tried = [provenances for _, provenances in wanted]
    return tuple(_describe(*each) for each in zip(spans, found, exact, tried, strict=True))


def _exact_provenance(
    request: PrefillRequest, number: int, span: Span, exact_chunks: bool
) -> KVProvenance | None:
    if span.kind == "system" or (span.kind == "chunk" and exact_chunks):
        return request.exact_provenance(number)
    return None


def _describe(
    span: Span,
    found: tuple[ChunkKV, KVProvenance] | None,
    exact: KVProvenance | None,
    tried: Sequence[KVProvenance],
) -> Matched:
    """`tried` are the makings that were looked for, the best first."""
    if span.tokens == 0:
        return Matched(span, "exact", "empty")
    if found is None:
        return Matched(span, "fresh", _why_fresh(span, _nowhere(exact, tried)))
    kv, provenance = found
    if provenance is exact:
        return Matched(span, "exact", "stored behind exactly this text", kv, provenance)
    better = list(takewhile(lambda other: other is not provenance, tried))
    reason = f"{_without(exact, better)}stored {_described(provenance, tried[len(better) :])}"
    return Matched(span, "reused", reason, kv, provenance)


def _described(provenance: KVProvenance, left: Sequence[KVProvenance]) -> str:
    """What KV was taken, and of how many versions; `left` are those that would have done, it among them."""
    place = "behind other chunks" if provenance.kind == OBSERVED else "to stand anywhere"
    several = len(left) > 1 and any(other.kind == OBSERVED for other in left)
    return f"{place} ({provenance.kind}){f', the best of {len(left)} versions' if several else ''}"


def _nowhere(exact: KVProvenance | None, tried: Sequence[KVProvenance]) -> str:
    """Why nothing was found, for people."""
    kinds = _kinds(exact, tried)
    if exact is None:
        return f"nothing is stored to stand anywhere ({kinds})"
    if not exact.context:
        return "not stored yet"
    return f"no KV behind exactly this text, {f'nor to stand anywhere ({kinds})' if kinds else 'and no other will do'}"


def _without(exact: KVProvenance | None, missed: Sequence[KVProvenance]) -> str:
    """What was looked for and not found before something was, for people."""
    kinds = _kinds(exact, missed)
    parts = [
        *(["no KV behind exactly this text"] if exact is not None else []),
        *([f"none made as {kinds}"] if kinds else []),
    ]
    return f"{', '.join(parts)}; " if parts else ""


def _kinds(exact: KVProvenance | None, tried: Sequence[KVProvenance]) -> str:
    return ", ".join(dict.fromkeys(provenance.kind for provenance in tried if provenance is not exact))


def _why_fresh(span: Span, otherwise: str) -> str:
    return "the question is always computed" if span.kind == "question" else otherwise
