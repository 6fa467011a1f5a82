"""What questions and answers attend to, and which selections of tokens find it: many samples through one model."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare, Previous, Similar
from kvweave.recipes.recipe import Recipe
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.fitting import render, too_long
from kvweave_lab.eval.preparing import prepare_sample
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.auxiliary import align
from kvweave_lab.eval.selection.differences import differences
from kvweave_lab.eval.selection.idealised import Answered, answer_idealised
from kvweave_lab.eval.selection.measure import Measured, measure
from kvweave_lab.eval.selection.observe import FullView, observe_full, observe_stale
from kvweave_lab.eval.selection.rankings import selection_scores
from kvweave_lab.eval.selection.report import SelectionReport
from kvweave_lab.eval.selection.summary import PromptFindings, summarise

PREPARATIONS: Mapping[str, str | Prepare] = MappingProxyType(
    {"isolated": "reuse", "bare": "direct", "similar": Similar(), "following": Previous()}
)
"""Kinds of stale KV by name: the recipe that makes and places it, or the preparation alone."""


def analyse(
    adapter: Adapter,
    store_folder: Path,
    samples: Sequence[Sample],
    *,
    ratio: float = 0.2,
    answered_ratios: Sequence[float] = (),
    auxiliary: Adapter | None = None,
    preparations: Mapping[str, str | Prepare] = PREPARATIONS,
    progress: Progress = lambda stage, done, total: None,
) -> SelectionReport:
    """Compare selections of context tokens over samples (ProphetKV figs. 3, 4, 6, 7, 9; FusionRAG figs. 3, 7b, 8).

    For each sample one full prefill, a greedy answer, and for each preparation the chunks' KV and one pass of
    the question over it. Samples of one length and chunk size make one report; `sweep_table` lays several side
    by side. Samples that the model has no room for are left out and counted, before anything runs.

    Args:
        adapter: the reference model.
        store_folder: an empty folder for chunk KV; cleared again and again.
        samples: at least one, each with chunks.
        ratio: share of the context tokens that selections take, above 0.
        answered_ratios: shares of the stale tokens at which prompts are answered with the tokens of each idealised
            selection recomputed, over the first preparation; none by default, since each costs several answers.
        auxiliary: another model whose last layer is compared (CacheClip §2.8); its tokenizer may differ.
        preparations: kinds of stale KV, the one that tables show in full first. A recipe's name stands for its
            preparation and places, a `Prepare` for itself at true positions.
        progress: told of every prompt done.

    Raises:
        InvalidRequest: no samples, a sample without chunks, a ratio that selects nothing.
        PromptTooLong: no prompt fits the model.
        UnknownRecipe: a preparation names none.
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
        work = _Analysis(adapter, store, recipes, ratio, tuple(answered_ratios), auxiliary)
        for done, sample in enumerate(fitting, 1):
            found.append(work.findings(sample))
            progress("prompts", done, len(fitting))
    foreseen_by = None if auxiliary is None else auxiliary.fingerprint.name
    return summarise(
        adapter.fingerprint.name, ratio, tuple(answered_ratios), foreseen_by, found, len(left_out)
    )


def _recipe(name: str, how: str | Prepare) -> Recipe:
    return recipe_named(how) if isinstance(how, str) else Recipe(name, prepare=how)


@dataclass(frozen=True, slots=True)
class _Analysis:
    """What every sample goes through."""

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
        """The store holds the recipe's KV of this prompt's chunks, and none of another preparation."""
        try:
            prepare_sample(self.adapter, self.store, sample, prompt, recipe)
            yield
        finally:
            self.store.clear()
