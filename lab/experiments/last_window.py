"""Measures which share of the selected rows lies in the last window of the context, before and after layers are left out.

    .venv/bin/python lab/experiments/last_window.py --model FOLDER --context-tokens 1980 --output lab/results/last_window.json

For models whose layers see a sliding window, or some of them. Before: all layers count, whatever they see. After: those that
see the whole context (`kvweave/recipes/select.py`). Prompts are those of `kvweave eval`: natural text with the evidence of
a question anywhere in it, without other documents. They are prefilled, not answered. `even` is the share of rows drawn evenly, `full_alone` that of
ProphetKV's score in the layers without a window.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiment import (
    argument_parser,
    command_of,
    dtype_and_device,
    environment,
    rounded,
    run_script,
    write_result,
)
from kvweave.cli.options import quiet_libraries
from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prefill_state import rows_of
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import QuestionAttention, TopScores
from kvweave.types import Span, TokenizedPrompt
from kvweave_lab.eval.evaluation import haystack_of, token_count
from kvweave_lab.eval.grid import generated_cases, suite_named
from kvweave_lab.eval.preparation import prepare_sample, render
from kvweave_lab.eval.samples import Sample
from kvweave_lab.statistics import interval_over_tasks
from papers.selected import evidence_tokens
from recipe_grid import progress_printer

RECIPES = (
    "prophetkv",
    "weave",
    "qcfuse",
    "kvshare",
    "fusionrag-alone",
    "fusionrag-over-stale",
    "cacheblend",
    "idealised",
)
TASKS = ("single", "multikey", "twohop", "coref")
FULL_ALONE = "full_alone"


@dataclass(frozen=True)
class Placed:
    """One prompt's selected rows: their share in the last window, and the selected share of the stale evidence, if any."""

    last_window: float
    evidence: float | None


@dataclass(frozen=True)
class Prompt:
    """A sample's prompt with its stale rows, ascending: which are in the last window, and which are evidence; (n,) each."""

    sample: Sample
    tokens: TokenizedPrompt
    stale: Tensor
    last: Tensor
    evidence: Tensor

    def placed(self, selected: Tensor) -> Placed:
        """Return where some of the stale rows are."""
        chosen = torch.isin(self.stale, selected)
        of_evidence = float(chosen[self.evidence].double().mean()) if self.evidence.any() else None
        return Placed(float(self.last[chosen].double().mean()), of_evidence)


@contextmanager
def every_layer_counts(adapter: Adapter) -> Iterator[None]:
    """Hide the windows from the scores: all layers count. They attend as before."""
    geometry = adapter.geometry
    adapter.geometry = replace(geometry, windows=())
    try:
        yield
    finally:
        adapter.geometry = geometry


def narrowest_window(adapter: Adapter) -> int:
    """Return the narrowest window of a model's layers; raises InvalidRequest for a model without one."""
    windows = [window for window in adapter.geometry.windows if window is not None]
    if not windows:
        raise InvalidRequest(f"{adapter.fingerprint.name} has no sliding windows; name a model that has")
    return min(windows)


def full_alone(adapter: Adapter) -> Recipe | None:
    """Return ProphetKV with the layers without a window alone; None if there are none."""
    layers = tuple(layer for layer, window in enumerate(adapter.geometry.windows) if window is None)
    select = TopScores(QuestionAttention(layers))
    return replace(recipe_named("prophetkv"), name=FULL_ALONE, select=select) if layers else None


def placed_prompt(adapter: Adapter, sample: Sample, window: int) -> Prompt:
    """Return a sample's prompt; all chunks but the first are stale, since nothing but the system prefix is before that."""
    sample = replace(sample, others=())
    tokens = render(adapter, sample)
    chunks: Sequence[Span] = [span for span in tokens.spans if span.kind == "chunk"]
    stale = rows_of(chunks[1:])
    evidence = torch.cat([evidence_tokens(adapter, sample, span) for span in chunks[1:]])
    return Prompt(sample, tokens, stale, stale >= chunks[-1].end - window, evidence)


def measure(
    adapter: Adapter, prompts: Sequence[Prompt], recipes: Sequence[Recipe], ratio: float
) -> list[dict[str, Any]]:
    """Return a row for each recipe: means over prompts, before and after."""
    found: dict[str, dict[str, list[Placed]]] = {
        recipe.name: {"before": [], "after": []} for recipe in recipes
    }
    report = progress_printer(adapter.fingerprint.name)
    for done, prompt in enumerate(prompts, 1):
        store = MemoryStore()
        for recipe in recipes:
            after = _selected(adapter, store, prompt, recipe, ratio)
            with every_layer_counts(adapter):
                before = _selected(adapter, store, prompt, recipe, ratio)
            found[recipe.name]["before"].append(prompt.placed(before))
            found[recipe.name]["after"].append(prompt.placed(after))
        report("prompts", done, len(prompts))
    return [
        {"recipe": name, **{when: _means(placed) for when, placed in both.items()}}
        for name, both in found.items()
    ]


def _selected(adapter: Adapter, store: MemoryStore, prompt: Prompt, recipe: Recipe, ratio: float) -> Tensor:
    prepare_sample(adapter, store, prompt.sample, prompt.tokens, recipe)
    return run(recipe, adapter, store, prompt.tokens, ratio=ratio).selected


def _means(placed: Sequence[Placed]) -> dict[str, Any]:
    shares = [one.last_window for one in placed]
    evidence = [one.evidence for one in placed if one.evidence is not None]
    return {
        "last_window": asdict(interval_over_tasks([shares])),
        "evidence": asdict(interval_over_tasks([evidence])) if evidence else None,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", required=True, help="as in `kvweave ask`; repeatable")
    parser.add_argument("--context-tokens", type=int, help="default: eight times the narrowest window")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=4, help="prompts of each task")
    parser.add_argument("--split", default="test")
    parser.add_argument("--task", action="append", help=f"default: {', '.join(TASKS)}")
    parser.add_argument("--recipe", action="append", help=f"default: {', '.join(RECIPES)}")
    args = parser.parse_args()
    quiet_libraries()
    models = []
    for name in args.model:
        adapter = load_model(name)
        models.append(_of_model(adapter, args))
    write_result({"ratio": args.ratio, "models": models, **environment(command_of(args))}, args.output)


def _of_model(adapter: Adapter, args: Any) -> dict[str, Any]:
    window = narrowest_window(adapter)
    suite = replace(
        suite_named("quick"),
        tasks=tuple(args.task or TASKS),
        context_tokens=(args.context_tokens or 8 * window,),
        chunk_tokens=args.chunk_tokens,
        samples=args.samples,
    )
    cases = generated_cases(suite, args.split, haystack_of(args.split, None), token_count(adapter))
    prompts = [placed_prompt(adapter, case.sample, window) for case in cases]
    recipes = [recipe_named(name) for name in args.recipe or RECIPES]
    alone = full_alone(adapter)
    result = {
        "model": adapter.fingerprint.name,
        "family": adapter.model.config.get_text_config().model_type,
        **dtype_and_device(adapter),
        "windows": list(adapter.geometry.windows),
        "window": window,
        "context_tokens": suite.context_tokens[0],
        "chunk_tokens": suite.chunk_tokens,
        "prompts": len(prompts),
        "even": sum(float(prompt.last.double().mean()) for prompt in prompts) / len(prompts),
        "rows": measure(adapter, prompts, [*recipes, *([alone] if alone else [])], args.ratio),
    }
    return rounded(result)


if __name__ == "__main__":
    run_script(main)
