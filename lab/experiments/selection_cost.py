"""Measures the cost of selecting tokens relative to full prefill, recipe by recipe, on a real shape.

    .venv/bin/python lab/experiments/selection_cost.py --output lab/results/selection_cost.json

Recipes are interleaved in one process. Selection begins when stored KV has been found and ends when the rows to recompute
are known. Placing stored KV is not counted, since every request does it. The baseline is the faster of transformers' causal
prefill and kvweave's, over the same ids in the same round. Weights are random, which does not affect the cost.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvweave
from experiment import command_of, dtype_and_device, environment, run_script, shape_parser, write_result
from kvweave.errors import KvweaveError
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.types import TokenizedPrompt
from kvweave_lab.bench.baselines import stock_attention, transformers_prefill
from kvweave_lab.bench.workload import prompt_of_chunks
from kvweave_lab.eval.grid import selectors
from kvweave_lab.eval.outcomes import FULL, REUSE
from kvweave_lab.shapes import random_model

Times = list[tuple[float, float]]
"""Seconds of selection and of the whole TTFT, round by round."""


def prepare_stores(
    adapter: Adapter, chunks: Sequence[str], recipes: Sequence[Recipe]
) -> tuple[dict[str, MemoryStore], dict[str, str]]:
    """Return a store for each recipe, shared by recipes with equal preparations, and reasons of recipes without one."""
    shared: list[tuple[Prepare, MemoryStore]] = []
    stores, refused = {}, {}
    for recipe in recipes:
        store = next((store for prepare, store in shared if prepare == recipe.prepare), None)
        if store is None:
            store = MemoryStore()
            shared.append((recipe.prepare, store))
        try:
            kvweave.prepare(adapter, store, chunks, recipe=recipe)
        except KvweaveError as error:
            refused[recipe.name] = str(error)
        else:
            stores[recipe.name] = store
    return stores, refused


def time_rounds(
    adapter: Adapter,
    prompt: TokenizedPrompt,
    recipes: Sequence[Recipe],
    stores: Mapping[str, MemoryStore],
    ratio: float,
    repeats: int,
) -> tuple[list[float], dict[str, Times]]:
    """Return full prefill's and each recipe's times by round, after a round that warms up."""
    ids = torch.tensor([prompt.token_ids])
    full, empty = recipe_named(FULL), MemoryStore()
    baseline: list[float] = []
    times: dict[str, Times] = {recipe.name: [] for recipe in recipes}
    for _ in range(repeats + 1):
        with stock_attention(adapter):
            start = time.perf_counter()
            transformers_prefill(adapter, ids)
            stock_s = time.perf_counter() - start
        baseline.append(min(stock_s, run(full, adapter, empty, prompt).timing.ttft_s))
        for recipe in recipes:
            timing = run(recipe, adapter, stores[recipe.name], prompt, ratio=ratio).timing
            times[recipe.name].append((timing.select_s, timing.ttft_s))
    return baseline[1:], {name: rounds[1:] for name, rounds in times.items()}


def measure(
    shape: str, context_tokens: int, chunk_tokens: int, ratio: float, repeats: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return the result without the environment; raises UnknownRecipe."""
    adapter = random_model(shape)
    question = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt, chunks = adapter.template.render(question), question.chunks
    recipes = [recipe_named(name) for name in names]
    stores, refused = prepare_stores(adapter, chunks, recipes)
    prepared = [recipe for recipe in recipes if recipe.name in stores]
    full, times = time_rounds(adapter, prompt, prepared, stores, ratio, repeats)
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "prompt_tokens": prompt.tokens,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "repeats": repeats,
        "full_s": statistics.median(full),
        "full_range_s": [min(full), max(full)],
        "rows": [row(name, rounds, full) for name, rounds in times.items()],
        "left_out": refused,
    }


def row(recipe: str, rounds: Times, full: Sequence[float]) -> dict[str, Any]:
    """Return medians over rounds; a share compares two times of the same round and also has its range."""
    select_s, ttft_s = zip(*rounds, strict=True)
    found: dict[str, Any] = {"recipe": recipe, "select_s": statistics.median(select_s)}
    for name, values in (("select", select_s), ("ttft", ttft_s)):
        shares = [value / full_s for value, full_s in zip(values, full, strict=True)]
        found |= {
            f"{name}_over_full": statistics.median(shares),
            f"{name}_over_full_range": [min(shares), max(shares)],
        }
    return found


def main() -> None:
    parser = shape_parser(__doc__, context_tokens=4096)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", action="append", help="default: all recipes that select tokens")
    args = parser.parse_args()
    names = args.recipe or [name for name in selectors() if name != REUSE]
    result = measure(args.shape, args.context_tokens, args.chunk_tokens, args.ratio, args.repeats, names)
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
