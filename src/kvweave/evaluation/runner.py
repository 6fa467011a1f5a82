"""Prompts through recipes: what each answers, how far that is from full attention, and what it cost in tokens.

Uses recipes the way every caller does; knows no method by name but `full`, which all are compared with, and
`reuse`, which stands for reuse without care.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.core import PlanSpan, TokenizedPrompt
from kvweave.engine.generation import Decoded, generate
from kvweave.evaluation.divergence import divergence
from kvweave.evaluation.faithfulness import ContainedFacts, Judge
from kvweave.evaluation.fitting import render
from kvweave.evaluation.journal import Journal
from kvweave.evaluation.memory_store import MemoryStore
from kvweave.evaluation.metrics import METRICS
from kvweave.evaluation.preparing import OtherDocuments, prepare_sample
from kvweave.evaluation.results import FULL, Label, Outcome, Trace
from kvweave.evaluation.samples import Sample
from kvweave.evaluation.watched import Watched
from kvweave.models.adapter import Adapter
from kvweave.models.attention_probe import AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.record import Record
from kvweave.recipes.request import PrefillResult

_GREEDY = GenerationConfig(temperature=0.0)


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
    """

    def __init__(self, adapter: Adapter, journal: Journal, judge: Judge | None = None) -> None:
        self._adapter = adapter
        self._journal = journal
        self._judge = judge or ContainedFacts()
        self._full = Candidate(recipe_named(FULL), 1.0)
        self._others = OtherDocuments(adapter)
        self._prepared: list[tuple[Prepare, tuple[Record, ...], MemoryStore]] = []

    def outcomes(
        self, sample: Sample, candidates: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Every candidate's outcome on one prompt, full attention's first; raises PromptTooLong.

        Computes only what the journal lacks, and full attention again where something has to be compared with it.
        """
        truth: _Truth | None = None
        try:
            for candidate in (self._full, *candidates):
                outcome = self._journal.get((sample.name, candidate.label))
                if outcome is None:
                    began = time.monotonic()
                    truth = truth or self._truth(sample)
                    if candidate == self._full:
                        answered = truth.answered
                    else:
                        answered = self._answer(candidate, sample, truth.prompt)
                    outcome = self._outcome(sample, candidate, answered, truth, context_tokens, seed, began)
                    self._journal.add(outcome)
                yield outcome
        finally:
            self._prepared.clear()  # nothing is warm for the next prompt

    def _truth(self, sample: Sample) -> _Truth:
        prompt = render(self._adapter, sample)
        spans = [span for span in prompt.spans if span.kind == "chunk"]
        bounds = (spans[0].start, spans[-1].end) if spans else (0, 0)
        probe = AttentionProbe(torch.arange(*prompt.user_rows), columns=bounds)
        recipe = self._full.recipe
        watched = replace(recipe, attend=Watched(recipe.attend, [probe]))
        answered = self._answer(Candidate(watched, self._full.ratio), sample, prompt)
        return _Truth(prompt, answered, bounds[0], probe.weights.mean(dim=0).cpu())

    def _answer(self, candidate: Candidate, sample: Sample, prompt: TokenizedPrompt) -> _Answered:
        adapter, recipe = self._adapter, candidate.recipe
        store = self._store_for(recipe, sample, prompt)
        result = run(recipe, adapter, store, prompt, ratio=candidate.ratio, coverage=candidate.coverage)
        decoded = Decoded()
        for _ in generate(
            adapter, result.canvas, prompt.token_ids, result.logits, _GREEDY, sample.max_new_tokens, decoded
        ):
            pass
        return _Answered(result, decoded.text.strip(), decoded.tokens)

    def _store_for(self, recipe: Recipe, sample: Sample, prompt: TokenizedPrompt) -> MemoryStore:
        """The system prefix and what the recipe prepares and records of this prompt, and nothing else.

        What a recipe finds then depends on nothing that ran before it, so a resumed evaluation gives the same traces.
        Recipes that prepare and record alike share it.
        """
        records = recipe.select.records
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
        truth: _Truth,
        context_tokens: int,
        seed: int,
        began: float,
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
            took_s=time.monotonic() - began,
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
