"""Runs recipes on prompts: their answers, how far those are from full attention's, and their cost in tokens.

Uses recipes as every caller does. Knows no method by name but `full`, with which all are compared.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.attention import RowPlan
from kvweave.models.hooks import AttentionHook, AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.place import Attend
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Matched, PrefillRequest, PrefillResult
from kvweave.recipes.select import voting_layers
from kvweave.results import PlanSpan
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.metrics import METRICS, ContainedFacts, Judge
from kvweave_lab.eval.outcomes import FULL, Label, Outcome, OutcomeLog, Trace
from kvweave_lab.eval.preparation import OtherDocuments, prepare_sample, render
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.eval.samples import Sample
from kvweave_lab.statistics import kl_divergence

BATCH = 8
"""Answers generated together by default: the KV of this many fits into memory with most models on most machines."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with its budget: a ratio or a coverage, 0..1; the other one is None."""

    recipe: Recipe
    ratio: float | None
    coverage: float | None = None

    @property
    def label(self) -> Label:
        """What runs on a prompt, as outcomes name it."""
        return self.recipe.name, self.ratio, self.coverage


class _Answer(NamedTuple):
    prefilled: PrefillResult
    text: str
    tokens: int
    took_s: float


class _Truth(NamedTuple):
    """A prompt, full attention's answer, and how much its question attends to each position of the context."""

    prompt: TokenizedPrompt
    answer: _Answer
    first: int
    attended: Tensor


class Runner:
    """Runs candidates on samples.

    Args:
        adapter: the model.
        log: where outcomes are looked up first and written to.
        judge: decides whether the context contains an answer's facts.
        batch: number of answers to a prompt that are generated together, each from its own KV.
    """

    def __init__(
        self, adapter: Adapter, log: OutcomeLog, judge: Judge | None = None, batch: int = BATCH
    ) -> None:
        self.adapter = adapter
        self._batch = batch
        self._log = log
        self._judge = judge or ContainedFacts()
        self._full = Candidate(recipe_named(FULL), 1.0)
        self._others = OtherDocuments(adapter)
        self._prepared: list[tuple[Prepare, tuple[FeatureExtractor, ...], MemoryStore]] = []

    def outcomes(
        self, sample: Sample, candidates: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Return every candidate's outcome on one prompt, full attention's first; raises PromptTooLong.

        Computes only what the log lacks. Full attention is computed again if an outcome must be compared with it.
        """
        found = {each.label: self._log.get((sample.name, each.label)) for each in (self._full, *candidates)}
        missing = [each for each in candidates if found[each.label] is None]
        try:
            if missing or found[self._full.label] is None:
                for outcome in self._compute(sample, missing, context_tokens, seed):
                    if found[outcome.label] is None:
                        self._log.add(outcome)
                        found[outcome.label] = outcome
        finally:
            self._prepared.clear()  # the next prompt starts cold
        yield from (outcome for outcome in found.values() if outcome is not None)

    def _compute(
        self, sample: Sample, candidates: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Yield full attention's outcome and those of the candidates, batch by batch."""
        truth = self._truth(sample)
        outcome = partial(self._outcome, sample, truth=truth, context_tokens=context_tokens, seed=seed)
        yield outcome(self._full, truth.answer)
        others = [each for each in candidates if each != self._full]
        for start in range(0, len(others), self._batch):
            batch = others[start : start + self._batch]
            for candidate, answer in zip(batch, self._answers(batch, sample, truth.prompt), strict=True):
                yield outcome(candidate, answer)

    def _truth(self, sample: Sample) -> _Truth:
        prompt = render(self.adapter, sample)
        spans = [span for span in prompt.spans if span.kind == "chunk"]
        bounds = (spans[0].start, spans[-1].end) if spans else (0, 0)
        votes = voting_layers(self.adapter.geometry, bounds[0], prompt.user_rows[1] - 1)
        probe = AttentionProbe(
            torch.arange(*prompt.user_rows),
            columns=bounds,
            layers=votes.layers,
            lift_windows=votes.lift_windows,
        )
        recipe = self._full.recipe
        probed = replace(recipe, attend=HookedAttend(recipe.attend, [probe]))
        (answer,) = self._answers([Candidate(probed, self._full.ratio)], sample, prompt)
        return _Truth(prompt, answer, bounds[0], probe.weights.mean(dim=0).cpu())

    def _answers(
        self, candidates: Sequence[Candidate], sample: Sample, prompt: TokenizedPrompt
    ) -> list[_Answer]:
        """Prefill one candidate after the other, and decode them together."""
        results, seconds = [], []
        for candidate in candidates:
            began = time.monotonic()
            results.append(self.prefill(candidate, sample, prompt))
            seconds.append(time.monotonic() - began)
        starts = [(result.kv_cache, prompt.token_ids, result.logits) for result in results]
        replies = generate_together(self.adapter, starts, sample.max_new_tokens)
        return [
            _Answer(result, reply.text.strip(), reply.tokens, prefill_s + reply.seconds)
            for result, reply, prefill_s in zip(results, replies, seconds, strict=True)
        ]

    def prefill(self, candidate: Candidate, sample: Sample, prompt: TokenizedPrompt) -> PrefillResult:
        """Prefill a prompt under one recipe, from the store that the recipe shares."""
        recipe, store = candidate.recipe, self._store_for(candidate.recipe, sample, prompt)
        return run(recipe, self.adapter, store, prompt, ratio=candidate.ratio, coverage=candidate.coverage)

    def _store_for(self, recipe: Recipe, sample: Sample, prompt: TokenizedPrompt) -> MemoryStore:
        """Return a store with the system prefix and what the recipe prepares and extracts of this prompt.

        It contains nothing else, so what a recipe finds does not depend on earlier runs, and a resumed evaluation gives
        the same traces. Recipes with the same preparation and extractors share a store.
        """
        extractors = recipe.select.extractors
        base: MemoryStore | None = None
        for prepare, extracted, store in self._prepared:
            if prepare == recipe.prepare and extracted == extractors:
                return store
            if prepare == recipe.prepare and not extracted:
                base = store  # the same KV, without the features
        store = MemoryStore(base or self._others.store(sample, prompt, recipe))
        prepare_sample(self.adapter, store, sample, prompt, recipe)
        self._prepared.append((recipe.prepare, extractors, store))
        return store

    def _outcome(
        self,
        sample: Sample,
        candidate: Candidate,
        answer: _Answer,
        *,
        truth: _Truth,
        context_tokens: int,
        seed: int,
    ) -> Outcome:
        chunks = [span for span in answer.prefilled.plan.spans if span.kind == "chunk"]
        return Outcome(
            task=sample.task,
            context_tokens=context_tokens,
            seed=seed,
            sample=sample.name,
            recipe=candidate.recipe.name,
            ratio=candidate.ratio,
            coverage=candidate.coverage,
            answer=answer.text,
            score=METRICS[sample.metric](answer.text, sample.answers),
            agreement=answer.text == truth.answer.text,
            kl=kl_divergence(truth.answer.prefilled.logits, answer.prefilled.logits),
            faithfulness=self._judge.share(answer.text, sample.chunks),
            rows=sum(span.tokens if span.origin == "fresh" else span.recomputed_tokens for span in chunks),
            selection=_selection(answer.prefilled.selected, chunks, truth),
            trace=_trace(answer.prefilled, answer.tokens),
            took_s=answer.took_s,
        )


@dataclass(frozen=True, slots=True)
class HookedAttend:
    """A recipe's attend slot with attention hooks on its rows; changes nothing else."""

    inner: Attend
    hooks: Sequence[AttentionHook]

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Return the result of the inner slot."""
        return self.inner.causal(request, matched)

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return the inner slot's plan with the hooks."""
        plan = self.inner.plan(request, matched, rows)
        plan.hooks.extend(self.hooks)
        return plan

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """Return the result of the inner slot, without the hooks."""
        return self.inner.continuation(request, matched)


def _selection(selected: Tensor, chunks: Sequence[PlanSpan], truth: _Truth) -> float | None:
    """Return the share of the selected stale positions that are among as many to which full attention attends most.

    Full attention's question decides. Exact positions count on neither side: no recipe has a reason to select them.
    """
    stale = torch.zeros(len(truth.attended), dtype=torch.bool)
    for span in chunks:
        stale[span.start - truth.first : span.end - truth.first] = span.origin == "reused"
    chosen = torch.zeros_like(stale)
    chosen[selected - truth.first] = True
    chosen &= stale
    if not chosen.any():
        return None
    best = top_tokens(truth.attended.masked_fill(~stale, float("-inf")), int(chosen.sum()))
    return float(best[chosen].float().mean())


def _trace(result: PrefillResult, decoded: int) -> Trace:
    tokens = {"exact": 0, "reused": 0, "fresh": 0}
    for span in result.plan.spans:
        tokens[span.origin] += span.tokens
    return Trace(tokens["exact"], tokens["reused"], len(result.selected), tokens["fresh"], decoded)
