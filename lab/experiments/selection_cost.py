"""What choosing tokens costs beside full prefill, recipe by recipe, interleaved in one process, on a real shape.

    .venv/bin/python lab/experiments/selection_cost.py --output lab/results/selection_cost.json

Selection runs from stored KV being found to the rows to recompute being known; laying stored KV out is not counted, since
every request pays for it. The baseline is the better of transformers' own causal prefill and ours without reuse, over
the same ids, in the same round. Weights are random: what is selected means nothing, what it costs does.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvweave
from kvweave.errors import KvweaveError
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.types import TokenizedPrompt
from kvweave_lab.bench.baseline import library_attention, stock_prefill
from kvweave_lab.bench.prompts import prompt_of_chunks
from kvweave_lab.eval.results import FULL, REUSE
from kvweave_lab.eval.suites import selectors
from measured import arguments, circumstances, command_of, computed_with, keep, started

Times = list[tuple[float, float]]
"""Seconds of selection and to the first token, round by round."""


def prepared(
    adapter: Adapter, chunks: Sequence[str], recipes: Sequence[Recipe]
) -> tuple[dict[str, MemoryStore], dict[str, str]]:
    """A store for each recipe, shared by those that prepare alike; and why some recipes have none."""
    made: list[tuple[Prepare, MemoryStore]] = []
    stores, refused = {}, {}
    for recipe in recipes:
        store = next((store for prepare, store in made if prepare == recipe.prepare), None)
        if store is None:
            store = MemoryStore()
            made.append((recipe.prepare, store))
        try:
            kvweave.prepare(adapter, store, chunks, recipe=recipe)
        except KvweaveError as error:
            refused[recipe.name] = str(error)
        else:
            stores[recipe.name] = store
    return stores, refused


def timed(
    adapter: Adapter,
    prompt: TokenizedPrompt,
    recipes: Sequence[Recipe],
    stores: Mapping[str, MemoryStore],
    ratio: float,
    repeats: int,
) -> tuple[list[float], dict[str, Times]]:
    """Full prefill of every round, and each recipe's times beside it; a round before them all warms up."""
    ids = torch.tensor([prompt.token_ids])
    full, nothing = recipe_named(FULL), MemoryStore()
    baseline: list[float] = []
    times: dict[str, Times] = {recipe.name: [] for recipe in recipes}
    for _ in range(repeats + 1):
        with library_attention(adapter):
            began = time.perf_counter()
            stock_prefill(adapter, ids)
            stock_s = time.perf_counter() - began
        baseline.append(min(stock_s, run(full, adapter, nothing, prompt).timing.ttft_s))
        for recipe in recipes:
            timing = run(recipe, adapter, stores[recipe.name], prompt, ratio=ratio).timing
            times[recipe.name].append((timing.select_s, timing.ttft_s))
    return baseline[1:], {name: rounds[1:] for name, rounds in times.items()}


def measure(
    shape: str, context_tokens: int, chunk_tokens: int, ratio: float, repeats: int, names: Sequence[str]
) -> dict[str, Any]:
    """Everything that is kept but the circumstances; raises UnknownRecipe."""
    adapter = random_model(shape)
    asked = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt, chunks = adapter.template.render(asked), asked.chunks
    recipes = [recipe_named(name) for name in names]
    stores, refused = prepared(adapter, chunks, recipes)
    able = [recipe for recipe in recipes if recipe.name in stores]
    full, times = timed(adapter, prompt, able, stores, ratio, repeats)
    return {
        "shape": shape,
        **computed_with(adapter),
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
    """Medians over rounds, and of shares their range; a share compares two times of one round."""
    select_s, ttft_s = zip(*rounds, strict=True)
    found: dict[str, Any] = {"recipe": recipe, "select_s": statistics.median(select_s)}
    for name, values in (("select", select_s), ("ttft", ttft_s)):
        shares = [value / whole for value, whole in zip(values, full, strict=True)]
        found |= {
            f"{name}_over_full": statistics.median(shares),
            f"{name}_over_full_range": [min(shares), max(shares)],
        }
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", action="append", help="default: all that select")
    args = parser.parse_args()
    names = args.recipe or [name for name in selectors() if name != REUSE]
    result = measure(args.shape, args.context_tokens, args.chunk_tokens, args.ratio, args.repeats, names)
    result |= circumstances(command_of(args))
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
