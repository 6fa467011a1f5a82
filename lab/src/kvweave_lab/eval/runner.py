"""Prompts through recipes: what each answers, how far that is from full attention, and what it cost in tokens.

Uses recipes the way every caller does; knows no method by name but `full`, which all are compared with, and
`reuse`, which stands for reuse without care.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.engine.generation import generate_together
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import PlanSpan, TokenizedPrompt
from kvweave_lab.eval.divergence import divergence
from kvweave_lab.eval.faithfulness import ContainedFacts, Judge
from kvweave_lab.eval.fitting import render
from kvweave_lab.eval.journal import Journal
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.preparing import OtherDocuments, prepare_sample
from kvweave_lab.eval.results import FULL, Label, Outcome, Trace
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.watched import Watched

_GREEDY = GenerationConfig(temperature=0.0)

BATCH = 8
"""As many answers as have room for their KV beside each other with most models on most machines."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with its budget: a ratio or a coverage, 0..1; the other one is None."""

    recipe: Recipe
    ratio: float | None
    coverage: float | None = None

    @property
    def label(self) -> Label:
        """How journals name it."""
        return self.recipe.name, self.ratio, self.coverage


class _Answered(NamedTuple):
    prefilled: PrefillResult
    text: str
    tokens: int
    took_s: float


class _Truth(NamedTuple):
    """A prompt, full attention's answer, and how much its question attends to each position of the context."""

    prompt: TokenizedPrompt
    answered: _Answered
    first: int
    attended: Tensor


class Runner:
    """Runs samples through candidates.

    Args:
        adapter: the model.
        journal: where outcomes are looked up first and written to.
        judge: what decides whether an answer's facts stand in the context.
        batch: so many answers to a prompt are generated together, each from KV of its own.
    """

    def __init__(
        self, adapter: Adapter, journal: Journal, judge: Judge | None = None, batch: int = BATCH
    ) -> None:
        self._adapter = adapter
        self._batch = batch
        self._journal = journal
        self._judge = judge or ContainedFacts()
        self._full = Candidate(recipe_named(FULL), 1.0)
        self._others = OtherDocuments(adapter)
        self._prepared: list[tuple[Prepare, tuple[FeatureExtractor, ...], MemoryStore]] = []

    def outcomes(
        self, sample: Sample, candidates: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Every candidate's outcome on one prompt, full attention's first; raises PromptTooLong.

        Computes only what the journal lacks, and full attention again where something has to be compared with it.
        """
        found = {
            each.label: self._journal.get((sample.name, each.label)) for each in (self._full, *candidates)
        }
        lacking = [each for each in candidates if found[each.label] is None]
        try:
            if lacking or found[self._full.label] is None:
                for outcome in self._computed(sample, lacking, context_tokens, seed):
                    if found[outcome.label] is None:
                        self._journal.add(outcome)
                        found[outcome.label] = outcome
        finally:
            self._prepared.clear()  # nothing is warm for the next prompt
        yield from (outcome for outcome in found.values() if outcome is not None)

    def _computed(
        self, sample: Sample, lacking: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Full attention's outcome and those of the candidates, as soon as a batch of them is answered."""
        truth = self._truth(sample)
        made = partial(self._outcome, sample, truth=truth, context_tokens=context_tokens, seed=seed)
        yield made(self._full, truth.answered)
        different = [each for each in lacking if each != self._full]
        for start in range(0, len(different), self._batch):
            together = different[start : start + self._batch]
            for candidate, answered in zip(
                together, self._answers(together, sample, truth.prompt), strict=True
            ):
                yield made(candidate, answered)

    def _truth(self, sample: Sample) -> _Truth:
        prompt = render(self._adapter, sample)
        spans = [span for span in prompt.spans if span.kind == "chunk"]
        bounds = (spans[0].start, spans[-1].end) if spans else (0, 0)
        probe = AttentionProbe(torch.arange(*prompt.user_rows), columns=bounds)
        recipe = self._full.recipe
        watched = replace(recipe, attend=Watched(recipe.attend, [probe]))
        (answered,) = self._answers([Candidate(watched, self._full.ratio)], sample, prompt)
        return _Truth(prompt, answered, bounds[0], probe.weights.mean(dim=0).cpu())

    def _answers(
        self, candidates: Sequence[Candidate], sample: Sample, prompt: TokenizedPrompt
    ) -> list[_Answered]:
        """Prefilled one after the other, decoded together."""
        results, seconds = [], []
        for candidate in candidates:
            began = time.monotonic()
            results.append(self._prefilled(candidate, sample, prompt))
            seconds.append(time.monotonic() - began)
        starts = [(result.kv_cache, prompt.token_ids, result.logits) for result in results]
        replies = generate_together(self._adapter, starts, _GREEDY, sample.max_new_tokens)
        return [
            _Answered(result, reply.text.strip(), reply.tokens, prefill_s + reply.seconds)
            for result, reply, prefill_s in zip(results, replies, seconds, strict=True)
        ]

    def _prefilled(self, candidate: Candidate, sample: Sample, prompt: TokenizedPrompt) -> PrefillResult:
        recipe, store = candidate.recipe, self._store_for(candidate.recipe, sample, prompt)
        return run(recipe, self._adapter, store, prompt, ratio=candidate.ratio, coverage=candidate.coverage)

    def _store_for(self, recipe: Recipe, sample: Sample, prompt: TokenizedPrompt) -> MemoryStore:
        """The system prefix and what the recipe prepares and records of this prompt, and nothing else.

        What a recipe finds then depends on nothing that ran before it, so a resumed evaluation gives the same traces.
        Recipes that prepare and record alike share it.
        """
        records = recipe.select.extractors
        base: MemoryStore | None = None
        for prepared, recorded, store in self._prepared:
            if prepared == recipe.prepare and recorded == records:
                return store
            if prepared == recipe.prepare and not recorded:
                base = store  # the same KV, to be joined by records
        store = MemoryStore(base or self._others.store(sample, prompt, recipe))
        prepare_sample(self._adapter, store, sample, prompt, recipe)
        self._prepared.append((recipe.prepare, records, store))
        return store

    def _outcome(
        self,
        sample: Sample,
        candidate: Candidate,
        answered: _Answered,
        *,
        truth: _Truth,
        context_tokens: int,
        seed: int,
    ) -> Outcome:
        chunks = [span for span in answered.prefilled.plan.spans if span.kind == "chunk"]
        return Outcome(
            task=sample.task,
            context_tokens=context_tokens,
            seed=seed,
            sample=sample.name,
            recipe=candidate.recipe.name,
            ratio=candidate.ratio,
            coverage=candidate.coverage,
            answer=answered.text,
            score=METRICS[sample.metric](answered.text, sample.answers),
            agreement=answered.text == truth.answered.text,
            kl=divergence(truth.answered.prefilled.logits, answered.prefilled.logits),
            faithfulness=self._judge.share(answered.text, sample.chunks),
            rows=sum(span.tokens if span.origin == "fresh" else span.recomputed_tokens for span in chunks),
            selection=_selection(answered.prefilled.selected, chunks, truth),
            trace=_trace(answered.prefilled, answered.tokens),
            took_s=answered.took_s,
        )


def _selection(selected: Tensor, chunks: Sequence[PlanSpan], truth: _Truth) -> float | None:
    """Share of the selected stale positions among the equally many to which full attention's question attends most.

    Exact positions compete on neither side: no recipe has a reason to select them.
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
