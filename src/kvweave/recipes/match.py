"""Slot 2, match: which stored KV stands for which span of the prompt."""

from dataclasses import dataclass
from typing import Protocol

from kvweave.core import ChunkKV, Making, Span, SpanKind
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.request import Matched, PrefillRequest

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


@dataclass(frozen=True, slots=True)
class MatchNothing:
    """Every span is computed."""

    remembers: frozenset[SpanKind] = NOTHING

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

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole path."""
        return _find(request, prepare, exact_chunks=True, any_chunks=False)


@dataclass(frozen=True, slots=True)
class MatchPathThenChunk:
    """The exact path first, then by content: nothing is recomputed that some entry can stand for."""

    remembers: frozenset[SpanKind] = PATHS

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """One catalogue query for the whole prompt."""
        return _find(request, prepare, exact_chunks=True, any_chunks=True)


def _find(
    request: PrefillRequest, prepare: Prepare, *, exact_chunks: bool, any_chunks: bool
) -> tuple[Matched, ...]:
    spans = request.prompt.spans
    exact = [_exact_making(request, i, span, exact_chunks) for i, span in enumerate(spans)]
    stale = [_prepared_making(request, span, prepare) if any_chunks else None for span in spans]
    wanted: list[tuple[int, Making]] = []
    for number, span in enumerate(spans):
        makings = dict.fromkeys(m for m in (exact[number], stale[number]) if m is not None and span.tokens)
        wanted += [(number, making) for making in makings]
    held = request.store.has_many(
        request.adapter.fingerprint, [(request.prompt.ids(spans[i]), m) for i, m in wanted]
    )
    chosen: dict[int, Making] = {}
    for (number, making), there in zip(wanted, held, strict=True):
        if there:
            chosen.setdefault(number, making)  # the exact one comes first
    loaded = request.store.get_many(
        request.adapter.fingerprint, [(request.prompt.ids(spans[i]), m) for i, m in chosen.items()]
    )
    found = dict(zip(chosen, loaded, strict=True))
    return tuple(
        _describe(request, span, found.get(i), chosen.get(i), exact[i], prepare)
        for i, span in enumerate(spans)
    )


def _exact_making(request: PrefillRequest, number: int, span: Span, exact_chunks: bool) -> Making | None:
    if span.kind == "system" or (span.kind == "chunk" and exact_chunks):
        return request.exact_making(number)
    return None


def _prepared_making(request: PrefillRequest, span: Span, prepare: Prepare) -> Making | None:
    if span.kind != "chunk":
        return None
    prefix = request.prompt.ids(request.prompt.spans[0])
    return prepare.making(request.adapter, prefix, request.prompt.ids(span))


def _describe(
    request: PrefillRequest,
    span: Span,
    kv: ChunkKV | None,
    making: Making | None,
    exact: Making | None,
    prepare: Prepare,
) -> Matched:
    if span.tokens == 0:
        return Matched(span, "exact", "empty")
    if kv is None or making is None:
        why = "its stored entry was damaged and dropped" if making is not None else "no stored entry fits"
        return Matched(span, "fresh", _why_fresh(span, why))
    if exact is not None and _same(making, exact):
        return Matched(span, "exact", "stored behind exactly this text", kv, span.start)
    prefix = request.prompt.ids(request.prompt.spans[0])
    return Matched(span, "reused", f"stored on its own ({making.kind})", kv, prepare.made_at(prefix))


def _same(one: Making, other: Making) -> bool:
    return (one.context, one.exact, one.rope_regime) == (other.context, other.exact, other.rope_regime)


def _why_fresh(span: Span, otherwise: str) -> str:
    return "the question is always computed" if span.kind == "question" else otherwise
