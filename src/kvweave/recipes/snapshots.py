"""Exact prefixes for models that stored KV cannot be placed in: the model's whole state after a prefix, stored and continued.

The states after the system prefix and after each chunk are stored, each under the tokens of its last span and the digests of
everything before it, as exact KV is. A later prompt that begins with the same tokens continues from the longest of them. It is
what vLLM and SGLang call prefix caching of hybrid models, at the boundaries of chunks.

An entry is a feature of the kind "state" (see `ChunkFeature`). It holds the whole text before it, so a state after n tokens
takes `fixed_bytes + n · token_bytes` of the adapter.
"""

import time
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from kvweave.cancellation import check_cancelled
from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.forward import check_logits
from kvweave.models.snapshot_adapter import ModelState, SnapshotAdapter
from kvweave.recipes.context import StoreEntry
from kvweave.recipes.match import MatchExactPath
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import MAX_EXACT_VERSIONS, Recipe
from kvweave.recipes.request import Budget
from kvweave.results import Plan, PlanSpan, Timing
from kvweave.types import ChunkFeature, KVProvenance, Span, TokenizedPrompt

STATE: Final = "state"
"""The kind of entry."""


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """A prefilled prompt, as `PrefillResult`; `state` is the model's state after it, owned by the caller.

    No position is rated, and none is computed again.
    """

    adapter: SnapshotAdapter
    logits: Tensor
    plan: Plan
    timing: Timing
    state: ModelState
    new_entries: tuple[StoreEntry, ...]
    selected: None = None
    scores: None = None


def uses_exact_prefixes_alone(recipe: Recipe) -> bool:
    """Return whether all that a recipe reuses was computed after exactly the same text."""
    return recipe == Recipe(recipe.name, NotPrepared(), MatchExactPath(), ratio=recipe.ratio)


def run_from_snapshot(
    recipe: Recipe,
    adapter: SnapshotAdapter,
    store: KVStore,
    prompt: TokenizedPrompt,
    budget: Budget,
) -> SnapshotResult:
    """Prefill a prompt from the longest stored state that it begins with; stop after each span to copy the new state.

    No entry is written: store `new_entries` once the answer is out. A budget that recomputes all ignores what is stored.

    Raises InvalidRequest for another recipe than one of exact prefixes, PromptTooLong, and ModelError for logits of NaN.
    """
    if not uses_exact_prefixes_alone(recipe):
        raise InvalidRequest(
            f"recipe {recipe.name} cannot be used with {adapter.fingerprint.name}; use prefix"
        )
    adapter.check_weights()
    adapter.check_length(prompt.tokens)
    started = time.perf_counter()
    path = _Path(prompt)
    first, state = (0, adapter.new_state()) if budget.recomputes_all else _longest(adapter, store, path)
    matched = time.perf_counter()
    entries: list[StoreEntry] = []
    room = store.limit_bytes
    for number in range(first, len(prompt.spans)):
        if prompt.spans[number].tokens:
            check_cancelled()
            logits = adapter.extend(state, prompt.ids(prompt.spans[number]))
            size = adapter.snapshot_bytes(state.tokens)
            if number in path.ends and size <= room:  # the copies wait in memory for the answer to be out
                entries.append(path.entry(number, adapter.snapshot(state)))
                room -= size
    check_logits(logits, adapter.fingerprint.name)
    adapter.synchronize()
    done = time.perf_counter()
    timing = Timing(
        match_s=matched - started,
        recompute_s=done - matched,
        ttft_s=done - started,
        total_s=done - started,
    )
    spans = tuple(_plan_span(span, number < first) for number, span in enumerate(prompt.spans))
    plan = Plan(recipe.name, budget.ratio, spans, budget.coverage)
    return SnapshotResult(adapter, logits, plan, timing, state, tuple(entries))


class _Path:
    """The digests of a prompt's spans, and `ends`: the spans after which a state is worth storing."""

    def __init__(self, prompt: TokenizedPrompt) -> None:
        self.prompt = prompt
        self.digests = [digest_tokens(prompt.ids(span)) for span in prompt.spans]
        self.ends = [
            number
            for number, span in enumerate(prompt.spans)
            if span.tokens and span.kind != "question" and span.end < prompt.tokens
        ]

    def provenance(self, number: int) -> KVProvenance:
        before = zip(self.prompt.spans[:number], self.digests[:number], strict=True)
        return KVProvenance(STATE, tuple(digest for span, digest in before if span.tokens))

    def entry(self, number: int, tensors: dict[str, Tensor]) -> StoreEntry:
        span = self.prompt.spans[number]
        path = zip(self.prompt.spans[: number + 1], self.digests[: number + 1], strict=True)
        sources = tuple(digest for part, digest in path if part.kind == "chunk")
        limit = MAX_EXACT_VERSIONS if span.kind == "chunk" else None
        feature = ChunkFeature(self.prompt.ids(span), tensors)
        return StoreEntry(feature, self.provenance(number), sources, limit)


def _longest(adapter: SnapshotAdapter, store: KVStore, path: _Path) -> tuple[int, ModelState]:
    """Return the longest stored state that the prompt begins with, and the number of the first span after it."""
    model, prompt = adapter.fingerprint, path.prompt
    keys = [(path.digests[number], path.provenance(number)) for number in path.ends]
    listed = [
        number for number, here in zip(path.ends, store.has_many(model, keys, "note"), strict=True) if here
    ]
    for number in reversed(listed or path.ends):  # if none is listed here, a shared tier may have one
        wanted = (prompt.ids(prompt.spans[number]), path.provenance(number))
        (found,) = store.find_features(model, [wanted])
        if found is not None:
            return number + 1, adapter.restore(found.tensors, prompt.spans[number].end)
    return 0, adapter.new_state()


def _plan_span(span: Span, stored: bool) -> PlanSpan:
    if stored or not span.tokens:
        reason = "in the model's state that was stored after exactly this text" if span.tokens else "empty"
        return PlanSpan(span.kind, span.start, span.end, "exact", 0, reason, span.chunk)
    reason = "no state stored after exactly this text"
    if span.kind == "question":
        reason = "the question is always computed"
    return PlanSpan(span.kind, span.start, span.end, "fresh", 0, reason, span.chunk)
