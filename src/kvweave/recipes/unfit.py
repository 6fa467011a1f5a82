"""Why none of the stored KV of a prompt's chunks fits it, said in a warning: all of them are then computed."""

from collections.abc import Sequence
from itertools import product

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import has_queries
from kvweave.recipes.match import Match
from kvweave.recipes.names import split_storage
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.request import OBSERVED, Matched, PrefillRequest
from kvweave.results import Plan, PlanSpan, SpanOrigin
from kvweave.types import KVProvenance, Span

_SETTINGS = "give `prepare`, `storage` and `system` as they were when the chunks were prepared"


def warn_if_none_fits(
    request: PrefillRequest, match: Match, prepare: Prepare, matched: Sequence[Matched]
) -> None:
    """Log once per store and reason why no chunk of a prompt gets the KV that is stored of it; else do nothing.

    A recipe that reuses chunks only after exactly the same text, or none, looks for no prepared KV.
    """
    numbers = _uncovered(match, [(found.span, found.origin) for found in matched])
    store, model = request.store, request.adapter.fingerprint
    if not numbers or not isinstance(store, ChunkStore):
        return
    chunks = [request.prompt.ids(request.prompt.spans[number]) for number in numbers]
    stored = [
        [each for each in versions if not (each.exact and _is_left_by_request(each))]
        for versions in store.versions(model, chunks)
    ]
    wanted = prepare.candidates(request, numbers)
    if not any(wanted):
        return
    if any(stored):
        reason = _reason(wanted, stored)
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
    numbers = _uncovered(match, [(span, span.origin) for span in plan.spans])
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


def _uncovered(match: Match, spans: Sequence[tuple[Span | PlanSpan, SpanOrigin]]) -> list[int]:
    """Return the numbers of the chunk spans if the recipe looks for prepared KV, and found KV for none of them."""
    if not match.position_independent:
        return []
    chunks = [number for number, (span, _) in enumerate(spans) if span.kind == "chunk" and span.tokens]
    return chunks if all(spans[number][1] == "fresh" for number in chunks) else []


def _is_left_by_request(provenance: KVProvenance) -> bool:
    return provenance.kind == OBSERVED or has_queries(provenance)


def _reason(wanted: Sequence[Sequence[KVProvenance]], stored: Sequence[Sequence[KVProvenance]]) -> str | None:
    """Say how the stored KV that comes nearest differs; None where it does not, because its file was lost."""
    pairs = [pair for ours, theirs in zip(wanted, stored, strict=True) for pair in product(ours, theirs)]
    if not pairs:
        return None
    best, nearest = min(pairs, key=lambda pair: len(_differences(*pair)))
    differences = _differences(best, nearest)
    if not differences:
        return None
    looked_for = ", ".join(dict.fromkeys(each.kind for each in wanted[_place(stored, nearest)]))
    return f"{' and '.join(differences)} (stored: {nearest.kind}; looked for: {looked_for}); {_SETTINGS}"


def _place(stored: Sequence[Sequence[KVProvenance]], one: KVProvenance) -> int:
    return next(number for number, versions in enumerate(stored) if one in versions)


def _differences(wanted: KVProvenance, stored: KVProvenance) -> list[str]:
    """Say what differs; exact KV of any kind is told apart by its context alone."""
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
