"""Analyses which context tokens questions and answers attend to, and which selections find them, over many samples."""

import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.answering.generation import Decoded
from kvweave.answering.generation import generate as decode
from kvweave.config import GenerationConfig
from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Prepare, Previous, Similar
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import TopScores
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.evaluation import haystack_of, token_count
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.preparation import prepare_sample, render, too_long
from kvweave_lab.eval.samples import Sample, SampleSpec, generate
from kvweave_lab.eval.selection.layer_attention import align
from kvweave_lab.eval.selection.measure import Measured, measure, selection_scores
from kvweave_lab.eval.selection.observe import FullView, differences, observe_full, observe_stale
from kvweave_lab.eval.selection.report import ANSWERED, Answered, PromptFindings, SelectionReport, summarise
from kvweave_lab.eval.tasks import EVERY_TASK
from kvweave_lab.statistics import kl_divergence

PREPARATIONS: Mapping[str, str | Prepare] = MappingProxyType(
    {"isolated": "reuse", "bare": "direct", "similar": Similar(), "following": Previous()}
)
"""Kinds of stale KV by name: the recipe that prepares and places it, or the preparation alone."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to analyse: every context length with every chunk size.

    Attributes:
        tasks: their names; samples of all of them make one report.
        split: pool of the samples.
        seed: of the samples.
        samples: prompts per task.
        context_tokens: lengths in tokens.
        chunk_tokens: largest chunks in tokens.
        ratio: share of the context tokens that selections take.
        answered_ratios: shares at which prompts are also answered with the selected tokens recomputed.
        haystack: a folder with natural text instead of the split's own.
    """

    tasks: tuple[str, ...]
    split: str
    seed: int
    samples: int
    context_tokens: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    ratio: float
    answered_ratios: tuple[float, ...] = ()
    haystack: Path | None = None


def run_sweep(
    adapter: Adapter,
    auxiliary: Adapter | None,
    sweep: Sweep,
    progress: Progress = no_progress,
) -> Mapping[str, SelectionReport]:
    """Return a report per pair of lengths, by a name made of them; duplicates in the sweep count once.

    Raises as `analyse` does, and for tasks that do not exist.
    """
    for task in sweep.tasks:
        if task not in EVERY_TASK:
            raise InvalidRequest(f"there is no task {task!r}; choose from {', '.join(EVERY_TASK)}")
    reports = {}
    for context_tokens in dict.fromkeys(sweep.context_tokens):
        for chunk_tokens in dict.fromkeys(sweep.chunk_tokens):
            name = f"{context_tokens} tokens in chunks of {chunk_tokens}"
            samples = _samples(adapter, sweep, context_tokens, chunk_tokens)
            with tempfile.TemporaryDirectory(prefix="kvweave-eval-") as folder:
                reports[name] = analyse(
                    adapter,
                    Path(folder),
                    samples,
                    ratio=sweep.ratio,
                    answered_ratios=sweep.answered_ratios,
                    auxiliary=auxiliary,
                    progress=_renamed(name, progress),
                )
    return reports


def _renamed(name: str, progress: Progress) -> Progress:
    """Return progress with this stage name."""
    return lambda stage, done, total: progress(name, done, total)


def _samples(adapter: Adapter, sweep: Sweep, context_tokens: int, chunk_tokens: int) -> list[Sample]:
    count, haystack = token_count(adapter), haystack_of(sweep.split, sweep.haystack)
    spec = SampleSpec(sweep.split, sweep.seed, context_tokens, chunk_tokens)
    return [
        sample
        for task in dict.fromkeys(sweep.tasks)
        for sample in generate(task, spec, sweep.samples, count, haystack)
    ]


def analyse(
    adapter: Adapter,
    store_folder: Path,
    samples: Sequence[Sample],
    *,
    ratio: float = 0.2,
    answered_ratios: Sequence[float] = (),
    auxiliary: Adapter | None = None,
    preparations: Mapping[str, str | Prepare] = PREPARATIONS,
    progress: Progress = no_progress,
) -> SelectionReport:
    """Compare selections of context tokens over samples (ProphetKV figs. 3, 4, 6, 7, 9; FusionRAG figs. 3, 7b, 8).

    Each sample takes one full prefill, a greedy answer, and for each preparation the chunks' KV and one pass of the
    question over it. Samples of one length and chunk size make one report; `sweep_table` shows several side by side.
    Samples that are too long for the model are left out and counted before anything runs.

    Args:
        adapter: the reference model.
        store_folder: an empty folder for chunk KV; cleared after each preparation.
        samples: at least one, each with chunks.
        ratio: share of the context tokens that selections take, above 0.
        answered_ratios: shares of the stale tokens at which prompts are answered with the tokens of each idealised
            selection recomputed, over the first preparation; none by default, since each costs several answers.
        auxiliary: another model whose last layer is compared (CacheClip §2.8); its tokenizer may differ.
        preparations: kinds of stale KV; tables show the first one in full. A recipe's name stands for its preparation
            and places, a `Prepare` for itself at true positions.
        progress: called after every prompt.

    Raises:
        InvalidRequest: no samples, a sample without chunks, a ratio that selects nothing.
        PromptTooLong: no prompt fits the model.
        UnknownRecipe: a preparation names no recipe.
    """
    ratios = (ratio, *answered_ratios)
    if not samples or not preparations or not all(0 < each <= 1 for each in ratios):
        raise InvalidRequest(
            f"nothing to compare: {len(samples)} samples, {len(preparations)} preparations, ratios {ratios}; "
            "give at least one of each, and ratios above 0 and up to 1"
        )
    recipes = {name: _recipe(name, how) for name, how in preparations.items()}
    left_out = too_long(adapter, samples)
    fitting = [sample for sample in samples if sample.name not in left_out]
    found = []
    with ChunkStore(store_folder) as store:
        analysis = _Analysis(adapter, store, recipes, ratio, tuple(answered_ratios), auxiliary)
        for done, sample in enumerate(fitting, 1):
            found.append(analysis.findings(sample))
            progress("prompts", done, len(fitting))
    auxiliary_name = None if auxiliary is None else auxiliary.fingerprint.name
    return summarise(
        adapter.fingerprint.name, ratio, tuple(answered_ratios), auxiliary_name, found, len(left_out)
    )


def _recipe(name: str, how: str | Prepare) -> Recipe:
    return recipe_named(how) if isinstance(how, str) else Recipe(name, prepare=how)


@dataclass(frozen=True, slots=True)
class _Analysis:
    """Models, store and settings of an analysis."""

    adapter: Adapter
    store: ChunkStore
    recipes: Mapping[str, Recipe]
    ratio: float
    answered_ratios: tuple[float, ...]
    auxiliary: Adapter | None

    def findings(self, sample: Sample) -> PromptFindings:
        prompt = render(self.adapter, sample)
        full = observe_full(self.adapter, prompt, sample.max_new_tokens)
        measured: dict[str, Measured] = {}
        answered: Answered | None = None
        for name, recipe in self.recipes.items():
            with self._prepared(recipe, sample, prompt):
                measured[name], scored = self._over_stale_kv(recipe, sample, prompt, full)
                if answered is None and self.answered_ratios:
                    answered = answer_idealised(
                        recipe, self.adapter, self.store, prompt, sample, full, scored, self.answered_ratios
                    )
        return PromptFindings(
            task=sample.task,
            context_tokens=full.context.tokens,
            chunks=len(sample.chunks),
            measured=measured,
            answered=answered,
            alignment=None if self.auxiliary is None else align(self.adapter, self.auxiliary, sample, full),
        )

    def _over_stale_kv(
        self, recipe: Recipe, sample: Sample, prompt: TokenizedPrompt, full: FullView
    ) -> tuple[Measured, Mapping[str, Tensor]]:
        stale = observe_stale(recipe, self.adapter, self.store, prompt)
        off = differences(full, stale)
        scores = selection_scores(full, stale, off, seed=zlib.crc32(sample.name.encode()))
        return measure(full, stale, off, scores, self.ratio), scores

    @contextmanager
    def _prepared(self, recipe: Recipe, sample: Sample, prompt: TokenizedPrompt) -> Iterator[None]:
        """Fill the store with the recipe's KV of this prompt's chunks, and clear it afterwards."""
        try:
            prepare_sample(self.adapter, self.store, sample, prompt, recipe)
            yield
        finally:
            self.store.clear()


# Answers after the tokens of an idealised selection were recomputed: how far a selection could get (ProphetKV App. F).
# Most selections need a full pass to know their tokens. All tokens are recomputed alike. Cost does not matter here.

_GREEDY = GenerationConfig(temperature=0.0)


@dataclass(frozen=True, slots=True)
class KnownScores:
    """Known scores (n,) of the context's tokens, the first token at position `start`."""

    known: Tensor
    start: int
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Return the scores of the stale tokens."""
        return self.known[state.stale - self.start]


def answer_idealised(
    recipe: Recipe,
    adapter: Adapter,
    store: KVStore,
    prompt: TokenizedPrompt,
    sample: Sample,
    full: FullView,
    scored: Mapping[str, Tensor],
    ratios: Sequence[float],
) -> Answered:
    """Answer a prompt over the recipe's KV, which the store holds, once for each selection and ratio."""

    def score(text: str) -> float:
        return METRICS[sample.metric](text, sample.answers)

    def attempt(scores: Tensor, ratio: float) -> tuple[float, float]:
        selecting = replace(recipe, select=TopScores(KnownScores(scores, full.context.start)))
        result = run(selecting, adapter, store, prompt, ratio=ratio)
        decoded = Decoded()
        for _ in decode(
            adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            _GREEDY,
            sample.max_new_tokens,
            decoded,
        ):
            pass
        return score(decoded.text.strip()), kl_divergence(full.logits, result.logits)

    found = torch.tensor(
        [[attempt(scored[name], ratio) for ratio in ratios] for name in ANSWERED], dtype=torch.float64
    )  # (A, P, 2)
    stale_score, stale_kl = attempt(scored["random"], 0.0)
    text = adapter.tokenizer.decode(full.answer, skip_special_tokens=True).strip()
    return Answered(found[..., 0], found[..., 1], score(text), stale_score, stale_kl)
