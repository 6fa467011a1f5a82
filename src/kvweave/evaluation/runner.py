"""Prompts through recipes: what each answers, how far that is from full attention, and what it cost in tokens.

Uses recipes the way every caller does; knows no method by name but `full`, which all are compared with, and
`reuse`, which stands for reuse without care.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from kvweave.evaluation.metrics import METRICS
from kvweave.evaluation.results import FULL, Outcome, Trace
from kvweave.evaluation.samples import Sample
from kvweave.evaluation.watched import Watched
from kvweave.models.adapter import Adapter
from kvweave.models.attention_probe import AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare, prefix_kv, prepare_chunks
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import PrefillResult
from kvweave.store.chunk_store import ChunkStore

_GREEDY = GenerationConfig(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe at a ratio, 0..1."""

    recipe: Recipe
    ratio: float

    @property
    def label(self) -> tuple[str, float]:
        """How tables and journals name it."""
        return self.recipe.name, self.ratio


class _Answered(NamedTuple):
    prefilled: PrefillResult
    text: str
    tokens: int


class _Truth(NamedTuple):
    """Full attention's answer, and how much its question attends to each prompt position of the context."""

    answered: _Answered
    first: int
    attended: Tensor


class Runner:
    """Runs samples through candidates.

    Args:
        adapter: the model.
        folder: an empty folder for chunk KV; cleared after every sample, so nothing is warm by accident.
        journal: where outcomes are looked up first and written to.
        judge: what decides whether an answer's facts stand in the context.
    """

    def __init__(self, adapter: Adapter, folder: Path, journal: Journal, judge: Judge | None = None) -> None:
        self._adapter = adapter
        self._store = ChunkStore(folder)
        self._journal = journal
        self._judge = judge or ContainedFacts()
        self._full = Candidate(recipe_named(FULL), 1.0)
        self._prepared: Prepare | None = None

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def outcomes(
        self, sample: Sample, candidates: Sequence[Candidate], context_tokens: int, seed: int
    ) -> Iterator[Outcome]:
        """Every candidate's outcome on one prompt, full attention's first; raises PromptTooLong.

        Computes only what the journal lacks, and full attention again where something has to be compared with it.
        """
        truth: _Truth | None = None
        try:
            for candidate in (self._full, *candidates):
                outcome = self._journal.get((sample.name, *candidate.label))
                if outcome is None:
                    began = time.monotonic()
                    truth = truth or self._truth(sample)
                    answered = truth.answered if candidate == self._full else self._answer(candidate, sample)
                    outcome = self._outcome(sample, candidate, answered, truth, context_tokens, seed, began)
                    self._journal.add(outcome)
                yield outcome
        finally:
            self._clear()

    def _truth(self, sample: Sample) -> _Truth:
        prompt = render(self._adapter, sample)
        spans = [span for span in prompt.spans if span.kind == "chunk"]
        bounds = (spans[0].start, spans[-1].end) if spans else (0, 0)
        probe = AttentionProbe(torch.arange(*prompt.user_rows), columns=bounds)
        recipe = self._full.recipe
        watched = replace(recipe, attend=Watched(recipe.attend, [probe]))
        answered = self._answer(Candidate(watched, self._full.ratio), sample)
        return _Truth(answered, bounds[0], probe.weights.mean(dim=0).cpu())

    def _answer(self, candidate: Candidate, sample: Sample) -> _Answered:
        adapter = self._adapter
        prompt = render(adapter, sample)
        self._prepare(candidate.recipe.prepare, prompt)
        result = run(candidate.recipe, adapter, self._store, prompt, ratio=candidate.ratio)
        decoded = Decoded()
        for _ in generate(
            adapter, result.canvas, prompt.token_ids, result.logits, _GREEDY, sample.max_new_tokens, decoded
        ):
            pass
        return _Answered(result, decoded.text.strip(), decoded.tokens)

    def _prepare(self, prepare: Prepare, prompt: TokenizedPrompt) -> None:
        """Store the system prefix and what the recipe prepares, and nothing else.

        What a recipe finds then depends on nothing that ran before it, so a resumed evaluation gives the same traces.
        """
        if prepare == self._prepared:
            return
        self._clear()
        system, *chunks = (prompt.ids(span) for span in prompt.spans[:-1])
        if system:
            prefix_kv(self._adapter, self._store, system)
        prepare_chunks(self._adapter, self._store, chunks, prepare, system=None)
        self._prepared = prepare

    def _clear(self) -> None:
        self._store.clear()
        self._prepared = None

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
        recipe, ratio = candidate.label
        chunks = [span for span in answered.prefilled.plan.spans if span.kind == "chunk"]
        return Outcome(
            task=sample.task,
            context_tokens=context_tokens,
            seed=seed,
            sample=sample.name,
            recipe=recipe,
            ratio=ratio,
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
