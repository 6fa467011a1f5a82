"""Measures the time to first token with one component left out or replaced, from memory and from disk.

    .venv/bin/python lab/experiments/components.py --output lab/results/components.json

All variants answer the same question over the same chunks, interleaved. The time runs from known chunks to the first
token's logits, tokenization included, also for full prefill, the faster of transformers' and kvweave's. Weights are
random, so answer quality is not measured here (see `lab/experiments/claims.py fusionrag-parts`). Variants select different
rows, and later rows attend to more tokens: `flops` is each variant's computation as a share of full prefill's.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiment import (
    command_of,
    dtype_and_device,
    environment,
    median_and_range,
    run_script,
    shape_parser,
    write_result,
)
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.recipes.match import Match
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.results import Timing
from kvweave.types import Prompt, SpanKind
from kvweave_lab.bench.baselines import MaskAttend, WorkCounter, stock_attention, transformers_prefill
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios
from kvweave_lab.bench.workload import PreparedStores, prompt_of_chunks
from kvweave_lab.recipes.baselines import StoredPositions
from kvweave_lab.shapes import random_model


@dataclass(frozen=True, slots=True)
class LoadAllLayersFirst:
    """A match that also reads and verifies every layer before anything is computed."""

    match: Match

    @property
    def stored_kinds(self) -> frozenset[SpanKind]:
        return self.match.stored_kinds

    @property
    def position_independent(self) -> bool:
        return self.match.position_independent

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        spans = self.match.find(request, prepare)
        for span in spans:
            if span.kv is not None:
                verify_content(span.kv)
        return spans


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe at a ratio. With `prefetches`, chunk KV is requested before the prompt is tokenized."""

    name: str
    recipe: Recipe
    ratio: float
    prefetches: bool = True


def variants(ratio: float) -> list[Variant]:
    """Return the complete recipe, and a variant without each component."""
    whole = recipe_named("prophetkv")
    return [
        Variant("everything", whole, ratio),
        Variant("nothing recomputed", recipe_named("reuse"), 0.0),
        Variant("random tokens instead of selection", recipe_named("random"), ratio),
        Variant("a mask instead of the operator", replace(whole, attend=MaskAttend()), ratio),
        Variant("positions as stored", replace(whole, place=StoredPositions()), ratio),
        Variant("chunks prepared alone", recipe_named("bare+prophetkv"), ratio),
        Variant("chunks prepared behind similar ones", recipe_named("similar+prophetkv"), ratio),
        Variant("nothing read ahead", whole, ratio, prefetches=False),
        Variant("all layers read first", replace(whole, match=LoadAllLayersFirst(whole.match)), ratio),
    ]


def flops(count: WorkCounter, step: Callable[[], object]) -> float:
    """Return the FLOPs of all passes of a step."""
    with count.record() as works:
        step()
    return sum(work.flops for work in works)


def time_request(
    adapter: Adapter, store: ChunkStore, variant: Variant, question: Prompt, cold: bool
) -> tuple[float, Timing]:
    """Return the seconds from known chunks to the first token's logits, and the timing of their parts."""
    recipe = variant.recipe
    prefix = adapter.template.prefix_ids(question.system)
    named = [
        (digest_tokens(ids), recipe.prepare.provenances(adapter, prefix, len(ids)))
        for ids in map(adapter.template.chunk_ids, question.chunks)
    ]
    if cold:
        store.forget_recent()
    start = time.perf_counter()
    with store.lease() as lease:
        if variant.prefetches:
            store.prefetch(adapter.fingerprint, named, lease)
        prompt = adapter.template.render(question)
        result = run(recipe, adapter, store, prompt, ratio=variant.ratio, lease=lease)
    return time.perf_counter() - start, result.timing


def full_prefills(adapter: Adapter, store: ChunkStore, question: Prompt) -> list[float]:
    """Return the seconds of transformers' and of kvweave's full prefill, tokenization included."""

    def stock() -> None:
        ids = adapter.template.render(question).token_ids
        transformers_prefill(adapter, torch.tensor([ids], device=adapter.geometry.device))
        adapter.synchronize()

    with stock_attention(adapter):
        stock_s = elapsed_s(stock)
    full = recipe_named("full")
    return [stock_s, elapsed_s(lambda: run(full, adapter, store, adapter.template.render(question)))]


def measure(
    adapter: Adapter, shape: str, context_tokens: int, chunk_tokens: int, ratio: float, rounds: int
) -> dict[str, Any]:
    """Return the result without the environment."""
    question = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    chosen = variants(ratio)
    with tempfile.TemporaryDirectory() as folder:
        recipes = [variant.recipe for variant in chosen]
        with PreparedStores(adapter, Path(folder), question.chunks, recipes) as stores:
            full, cases = timings(adapter, stores, chosen, question, rounds)
    fastest = min(zip(*full, strict=True), key=lambda way: MedianRange.of(way).median)
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "context_tokens": context_tokens,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "rounds": rounds,
        "full_s": median_and_range(MedianRange.of(fastest)),
        "rows": [row(case, fastest) for case in cases],
    }


@dataclass(slots=True)
class Case:
    """A variant from memory or disk: its FLOPs as a share of full prefill's, and the seconds and timing of every round."""

    variant: Variant
    cold: bool
    flops: float
    times: list[tuple[float, Timing]] = field(default_factory=list)


def timings(
    adapter: Adapter, stores: PreparedStores, chosen: Sequence[Variant], question: Prompt, rounds: int
) -> tuple[list[list[float]], list[Case]]:
    """Return full prefill's seconds by round, and the cases. A first run of each is not timed; its work is counted."""
    count = WorkCounter(adapter)

    def step(variant: Variant, cold: bool) -> tuple[float, Timing]:
        return time_request(adapter, stores.of(variant.recipe), variant, question, cold)

    def full_step() -> list[float]:
        return full_prefills(adapter, stores.of(chosen[0].recipe), question)

    full_flops = flops(count, full_step)
    cases = [
        Case(variant, cold, flops(count, partial(step, variant, cold)) / full_flops)
        for cold in (False, True)
        for variant in chosen
    ]
    full = []
    for number in range(rounds):
        full.append(full_step())
        for case in cases if number % 2 else cases[::-1]:
            case.times.append(step(case.variant, case.cold))
    return full, cases


def row(case: Case, full: Sequence[float]) -> dict[str, Any]:
    """Return medians over rounds; the speed-up compares two times of the same round."""
    ttft_s = [seconds for seconds, _ in case.times]
    parts = ("match_s", "place_s", "select_s", "recompute_s")
    return {
        "variant": case.variant.name,
        "from": "disk" if case.cold else "memory",
        "flops": case.flops,
        "ttft_s": median_and_range(MedianRange.of(ttft_s)),
        "speedup": median_and_range(paired_ratios(full, ttft_s)),
        **{part: MedianRange.of(getattr(timing, part) for _, timing in case.times).median for part in parts},
    }


def main() -> None:
    parser = shape_parser(__doc__, context_tokens=8192)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    result = measure(adapter, args.shape, args.context_tokens, args.chunk_tokens, args.ratio, args.rounds)
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
