"""Slot 2, match: which stored KV is used for which span of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import ClassVar, Protocol

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import has_queries
from kvweave.recipes.names import split_storage
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.request import OBSERVED, Matched, PrefillRequest
from kvweave.results import Plan, PlanSpan, SpanOrigin
from kvweave.types import ChunkKV, KVProvenance, Span, SpanKind

SYSTEM_ONLY: frozenset[SpanKind] = frozenset({"system"})
SYSTEM_AND_CHUNKS: frozenset[SpanKind] = frozenset({"system", "chunk"})


class Match(Protocol):
    """Looks up stored KV for every span of a prompt."""

    @property
    def stored_kinds(self) -> frozenset[SpanKind]:
        """Kinds of spans whose exact KV, computed in a request, is worth storing: later requests look for it."""

    @property
    def position_independent(self) -> bool:
        """Whether chunk KV is used at any position, so that it can be loaded before the prompt is known."""

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        """Return one result per span, in order. Damaged and evicted entries count as missing."""


@dataclass(frozen=True, slots=True)
class MatchNothing:
    """Compute every span."""

    stored_kinds: ClassVar[frozenset[SpanKind]] = frozenset()
    position_independent: ClassVar[bool] = False

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        return tuple(
            Matched(span, "fresh", _why_fresh(span, "this recipe reuses nothing"))
            for span in request.prompt.spans
        )


class _MatchStored(Match):
    """What is stored, in one catalogue query for the whole prompt; the system prefix is always exact.

    `exact_chunks` looks for chunks after exactly the same text, `position_independent` for chunks by content. With both, what
    earlier prompts left of a chunk after other text is used where nothing better is stored, at the cost of one more query.
    """

    exact_chunks: ClassVar[bool]

    @property
    def stored_kinds(self) -> frozenset[SpanKind]:
        return SYSTEM_AND_CHUNKS if self.exact_chunks else SYSTEM_ONLY

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        spans = request.prompt.spans
        kinds = self.stored_kinds
        exact = [request.exact_provenance(i) if span.kind in kinds else None for i, span in enumerate(spans)]
        by_content = [i for i, span in enumerate(spans) if self.position_independent and span.kind == "chunk"]
        candidates = dict(zip(by_content, prepare.candidates(request, by_content), strict=True))
        tried = [
            [*([best] if best is not None else []), *candidates.get(number, ())]
            for number, best in enumerate(exact)
        ]
        left = {}
        if self.exact_chunks and by_content:
            left = dict(zip(by_content, left_by_requests(request, by_content), strict=True))
        wanted = [
            (request.prompt.ids(span), [*tried[number], *left.get(number, ())] if span.tokens else [])
            for number, span in enumerate(spans)
        ]
        found = request.store.find(request.adapter.fingerprint, wanted, request.lease)
        return tuple(_matched(*each) for each in zip(spans, found, exact, tried, strict=True))


@dataclass(frozen=True, slots=True)
class MatchSystemThenChunk(_MatchStored):
    """The system prefix exactly; chunks by content, at any position."""

    exact_chunks: ClassVar[bool] = False
    position_independent: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MatchExactPath(_MatchStored):
    """Only KV computed after exactly the same earlier spans (RAGCache's knowledge tree, PerCache §4.1.1).

    A node whose parent was evicted still equals full attention and is used: its rows depend on the text before them, not on
    whether that text's KV is still stored.
    """

    exact_chunks: ClassVar[bool] = True
    position_independent: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class MatchPathThenChunk(_MatchStored):
    """The exact path first, then chunks by content: as prepared, else as an earlier prompt computed them after other text."""

    exact_chunks: ClassVar[bool] = True
    position_independent: ClassVar[bool] = True


def left_by_requests(request: PrefillRequest, spans: Sequence[int]) -> list[list[KVProvenance]]:
    """Return for each chunk span the exact KV that earlier prompts computed after the same system prefix, the best first.

    It is stale in this prompt, but needs no preparation. The more of the chunks before it are also before it in this
    prompt, and the fewer are not, the better it is.
    """
    ids, prefix = [request.prompt.ids(request.prompt.spans[number]) for number in spans], request.system_path
    found = []
    for number, versions in zip(spans, request.store.versions(request.adapter.fingerprint, ids), strict=True):
        regime, before = request.exact_provenance(number).rope_regime, set(request.chunks_before(number))
        usable = [
            (len(before.symmetric_difference(preceding_chunks(request, each))), each)
            for each in versions
            if each.exact and each.rope_regime == regime and each.context[: len(prefix)] == prefix
        ]
        found.append([each for _, each in sorted(usable, key=lambda pair: pair[0])])
    return found


def preceding_chunks(request: PrefillRequest, provenance: KVProvenance) -> tuple[str, ...]:
    """Return the digests of the chunks that this KV was computed after; none if not after this prompt's prefix."""
    prefix = request.system_path
    return provenance.context[len(prefix) :] if provenance.context[: len(prefix)] == prefix else ()


def missing_chunks(request: PrefillRequest, match: Match, prepare: Prepare) -> list[int]:
    """Return the numbers of the prompt's chunk spans for which the catalogue lists no usable KV, in order.

    Reads no entry and counts as no look-up.
    """
    chunks = [number for number, span in enumerate(request.prompt.spans) if span.kind == "chunk"]
    by_path = "chunk" in match.stored_kinds
    wanted = [
        (number, provenance)
        for number, candidates in zip(chunks, prepare.candidates(request, chunks), strict=True)
        for provenance in (*([request.exact_provenance(number)] if by_path else []), *candidates)
    ]
    keys = [(request.digests[number], provenance) for number, provenance in wanted]
    stored = request.store.has_many(request.adapter.fingerprint, keys)
    found = {number for (number, _), is_stored in zip(wanted, stored, strict=True) if is_stored}
    return [number for number in chunks if number not in found]


def _matched(
    span: Span,
    found: tuple[ChunkKV, KVProvenance] | None,
    exact: KVProvenance | None,
    tried: Sequence[KVProvenance],
) -> Matched:
    """Describe one look-up; `tried` are the provenances that were looked for, best first."""
    if span.tokens == 0:
        return Matched(span, "exact", "empty")
    if found is None:
        return Matched(span, "fresh", _why_fresh(span, _why_missing(exact, tried)))
    kv, provenance = found
    if provenance is exact:
        return Matched(span, "exact", "stored after exactly this text", kv, provenance)
    better = list(takewhile(lambda other: other is not provenance, tried))
    reason = f"{_why_not_better(exact, better)}stored {_used(provenance, tried[len(better) :])}"
    return Matched(span, "reused", reason, kv, provenance)


def _used(provenance: KVProvenance, usable: Sequence[KVProvenance]) -> str:
    """Say which KV is used, and of how many versions; `usable` is that one and all that rank below it."""
    computed = "after other chunks" if provenance.kind == OBSERVED else "for any position"
    versions = len(usable) > 1 and any(other.kind == OBSERVED for other in usable)
    return f"{computed} ({provenance.kind}){f', the best of {len(usable)} versions' if versions else ''}"


def _why_missing(exact: KVProvenance | None, tried: Sequence[KVProvenance]) -> str:
    kinds = _kinds(exact, tried)
    if exact is None:
        return f"nothing is stored for any position ({kinds})"
    if not exact.context:
        return "not stored yet"
    return f"no KV after exactly this text, {f'nor for any position ({kinds})' if kinds else 'and this recipe accepts no other'}"


def _why_not_better(exact: KVProvenance | None, missed: Sequence[KVProvenance]) -> str:
    """Say which better KV was looked for and not found."""
    kinds = _kinds(exact, missed)
    parts = [
        *(["no KV after exactly this text"] if exact is not None else []),
        *([f"none prepared as {kinds}"] if kinds else []),
    ]
    return f"{', '.join(parts)}; " if parts else ""


def _kinds(exact: KVProvenance | None, tried: Sequence[KVProvenance]) -> str:
    return ", ".join(dict.fromkeys(provenance.kind for provenance in tried if provenance is not exact))


def _why_fresh(span: Span, otherwise: str) -> str:
    return "the question is always computed" if span.kind == "question" else otherwise


# Why none of the stored KV fits a prompt's chunks, said in a warning

_SETTINGS = "give `prepare`, `storage` and `system` as they were when the chunks were prepared"


def warn_if_none_fits(
    request: PrefillRequest, match: Match, prepare: Prepare, matched: Sequence[Matched]
) -> None:
    """Log once per store and reason why no chunk of a prompt gets the KV that is stored of it; else do nothing.

    A recipe that reuses chunks only after exactly the same text, or none, looks for no prepared KV.
    """
    numbers = _without_kv(match, [(found.span, found.origin) for found in matched])
    store, model = request.store, request.adapter.fingerprint
    if not numbers or not isinstance(store, ChunkStore):
        return
    chunks = [request.prompt.ids(request.prompt.spans[number]) for number in numbers]
    wanted = prepare.candidates(request, numbers)
    # Exact KV that requests left says nothing about how the chunks were prepared.
    stored = [
        [each for each in versions if not each.exact or not (each.kind == OBSERVED or has_queries(each))]
        for versions in store.versions(model, chunks)
    ]
    if not any(wanted):
        return
    if any(stored):
        reason = _difference(wanted, stored)
    elif others := store.other_models(model, chunks):
        reason = (
            f"it was made by {' and '.join(others)}, and the model is {model.name}; weights, dtype, configuration and "
            "tokenizer must be the same"
        )
    else:
        return
    if reason:
        message = f"no stored KV fits this prompt's chunks, so all are computed: {reason}"
        store.warn_once(message, lambda: message)


def warn_if_unknown(request: PrefillRequest, match: Match, prepare: Prepare, plan: Plan) -> None:
    """Log once per store that chunks are prepared in it, but none of a prompt's; else do nothing.

    For callers who bring their own chunks, and may cut them in another way than when they prepared them.
    """
    numbers = _without_kv(match, [(span, span.origin) for span in plan.spans])
    store, model = request.store, request.adapter.fingerprint
    if not numbers or not isinstance(store, ChunkStore) or not any(prepare.candidates(request, numbers)):
        return
    chunks = [request.prompt.ids(request.prompt.spans[number]) for number in numbers]
    if any(store.versions(model, chunks)) or store.other_models(model, chunks):
        return
    # Counting reads every row of the store, and is of use for one warning.
    store.warn_once("unknown chunks", lambda: _unknown(store.prepared_chunks(model)))


def _unknown(prepared: int) -> str:
    """Return the warning where so many chunks are prepared, none of them in the prompt; empty where none is."""
    if not prepared:
        return ""
    return (
        f"{prepared} chunks are prepared in this store, but none of this prompt's, so all are computed: a chunk is found "
        "by its exact text, white space included; give `prepare` the same texts"
    )


def _without_kv(match: Match, spans: Sequence[tuple[Span | PlanSpan, SpanOrigin]]) -> list[int]:
    """Return the numbers of the chunk spans if the recipe looks for prepared KV, and found KV for none of them."""
    if not match.position_independent:
        return []
    chunks = [number for number, (span, _) in enumerate(spans) if span.kind == "chunk" and span.tokens]
    return chunks if all(spans[number][1] == "fresh" for number in chunks) else []


def _difference(
    wanted: Sequence[Sequence[KVProvenance]], stored: Sequence[Sequence[KVProvenance]]
) -> str | None:
    """Say how the stored KV that comes nearest differs; None where it does not, because its file was lost."""
    pairs = [pair for ours, theirs in zip(wanted, stored, strict=True) for pair in product(ours, theirs)]
    differences, best, nearest = min(
        ((_differences(*pair), *pair) for pair in pairs),
        key=lambda found: len(found[0]),
        default=([], None, None),
    )
    if best is None or nearest is None or not differences:
        return None
    return f"{' and '.join(differences)} (stored: {nearest.kind}; looked for: {best.kind}); {_SETTINGS}"


def _differences(wanted: KVProvenance, stored: KVProvenance) -> list[str]:
    """Describe the difference; exact KV of any kind differs by its context alone."""
    (preparation, storage), (made_as, stored_as) = split_storage(wanted.kind), split_storage(stored.kind)
    said = []
    if preparation != made_as and (wanted.context != stored.context or not (wanted.exact and stored.exact)):
        said.append(f"it was prepared as {made_as}, not as {preparation}")
    if storage != stored_as:
        said.append(f"it is stored as {stored_as or 'exact'}, not as {storage or 'exact'}")
    if wanted.context[:1] != stored.context[:1] and wanted.context and stored.context:
        said.append("it was computed after another system instruction")
    if wanted.rope_regime != stored.rope_regime:
        said.append("the rotary frequencies of this prompt's length are others")
    return said
