"""Time to first token with one component after the other left out or exchanged, interleaved, from memory and from disk.

    .venv/bin/python lab/experiments/components.py --output lab/results/components.json

Every variant answers the same question over the same chunks, each time from "chunks are known" to the first token's
logits, tokenizing included; full prefill, the faster of transformers' and ours, starts at the same moment. What a component
does for the answer's quality is not measured here: weights are random (`lab/experiments/claims.py fusionrag-parts`). Variants choose
different rows, and a row late in the prompt attends to more: `flops` says what each has to compute, as a share of full prefill's.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.match import Match
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.place import AsStored
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.types import Prompt, SpanKind, Timing
from kvweave_lab.bench.baseline import library_attention, stock_prefill
from kvweave_lab.bench.masked_attention import Masked
from kvweave_lab.bench.prompts import prompt_of_chunks
from kvweave_lab.bench.spread import Spread, ratios, timed
from kvweave_lab.bench.stores import PreparedStores
from kvweave_lab.bench.work import WorkCount
from measured import arguments, circumstances, command_of, computed_with, keep, numbers, started


@dataclass(frozen=True, slots=True)
class LoadedFirst:
    """As another match, and every layer is read and verified before anything is computed."""

    match: Match

    @property
    def remembers(self) -> frozenset[SpanKind]:
        return self.match.remembers

    @property
    def anywhere(self) -> bool:
        return self.match.anywhere

    def find(self, request: PrefillRequest, prepare: Prepare) -> tuple[Matched, ...]:
        found = self.match.find(request, prepare)
        for one in found:
            if one.kv is not None:
                verify_content(one.kv)
        return found


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe at a ratio. `ahead`: chunk KV is asked for before the prompt is tokenized."""

    name: str
    recipe: Recipe
    ratio: float
    ahead: bool = True


def variants(ratio: float) -> list[Variant]:
    """The whole, and what becomes of it without each part."""
    whole = recipe_named("prophetkv")
    return [
        Variant("everything", whole, ratio),
        Variant("nothing recomputed", recipe_named("reuse"), 0.0),
        Variant("random tokens instead of selection", recipe_named("random"), ratio),
        Variant("a mask instead of the operator", replace(whole, attend=Masked()), ratio),
        Variant("positions as stored", replace(whole, place=AsStored()), ratio),
        Variant("chunks prepared alone", recipe_named("bare+prophetkv"), ratio),
        Variant("chunks prepared behind similar ones", recipe_named("similar+prophetkv"), ratio),
        Variant("nothing read ahead", whole, ratio, ahead=False),
        Variant("all layers read first", replace(whole, match=LoadedFirst(whole.match)), ratio),
    ]


def flops(count: WorkCount, step: Callable[[], object]) -> float:
    """Of all passes of a step."""
    with count.counting() as works:
        step()
    return sum(work.flops for work in works)


def answered(
    adapter: Adapter, store: ChunkStore, variant: Variant, asked: Prompt, cold: bool
) -> tuple[float, Timing]:
    """Seconds from chunks known to the first token's logits, and where they went."""
    recipe = variant.recipe
    prefix = adapter.template.prefix_ids(asked.system)
    named = [
        (digest_tokens(ids), recipe.prepare.provenances(adapter, prefix, len(ids)))
        for ids in map(adapter.template.chunk_ids, asked.chunks)
    ]
    if cold:
        store.forget_recent()
    began = time.perf_counter()
    with store.lease() as lease:
        if variant.ahead:
            store.prefetch(adapter.fingerprint, named, lease)
        prompt = adapter.template.render(asked)
        result = run(recipe, adapter, store, prompt, ratio=variant.ratio, lease=lease)
    return time.perf_counter() - began, result.timing


def full_prefills(adapter: Adapter, store: ChunkStore, asked: Prompt) -> list[float]:
    """Seconds of transformers' and of ours, tokenizing included."""

    def stock() -> None:
        ids = adapter.template.render(asked).token_ids
        stock_prefill(adapter, torch.tensor([ids], device=adapter.geometry.device))
        adapter.synchronize()

    with library_attention(adapter):
        stock_s = timed(stock)
    full = recipe_named("full")
    return [stock_s, timed(lambda: run(full, adapter, store, adapter.template.render(asked)))]


def measure(
    adapter: Adapter, shape: str, context_tokens: int, chunk_tokens: int, ratio: float, rounds: int
) -> dict[str, Any]:
    """Everything that is kept but the circumstances."""
    asked = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    chosen = variants(ratio)
    with tempfile.TemporaryDirectory() as folder:
        recipes = [variant.recipe for variant in chosen]
        with PreparedStores(adapter, Path(folder), asked.chunks, recipes) as stores:
            full, cases = timings(adapter, stores, chosen, asked, rounds)
    fastest = min(zip(*full, strict=True), key=lambda way: Spread.of(way).median)
    return {
        "shape": shape,
        **computed_with(adapter),
        "context_tokens": context_tokens,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "rounds": rounds,
        "full_s": numbers(Spread.of(fastest)),
        "rows": [row(case, fastest) for case in cases],
    }


@dataclass(slots=True)
class Case:
    """A variant from memory or from the disk: FLOPs as a share of full prefill's, and every round's seconds."""

    variant: Variant
    cold: bool
    flops: float
    times: list[tuple[float, Timing]] = field(default_factory=list)


def timings(
    adapter: Adapter, stores: PreparedStores, chosen: Sequence[Variant], asked: Prompt, rounds: int
) -> tuple[list[list[float]], list[Case]]:
    """Full prefill's seconds by round, and the cases; everything runs once before, while its work is counted."""
    count = WorkCount(adapter)

    def step(variant: Variant, cold: bool) -> tuple[float, Timing]:
        return answered(adapter, stores.of(variant.recipe), variant, asked, cold)

    def full_step() -> list[float]:
        return full_prefills(adapter, stores.of(chosen[0].recipe), asked)

    whole = flops(count, full_step)
    cases = [
        Case(variant, cold, flops(count, partial(step, variant, cold)) / whole)
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
    """Medians over rounds; the speed-up compares two times of one round."""
    ttft_s = [seconds for seconds, _ in case.times]
    parts = ("match_s", "place_s", "select_s", "recompute_s")
    return {
        "variant": case.variant.name,
        "from": "disk" if case.cold else "memory",
        "flops": case.flops,
        "ttft_s": numbers(Spread.of(ttft_s)),
        "speedup": numbers(ratios(full, ttft_s)),
        **{part: Spread.of(getattr(timing, part) for _, timing in case.times).median for part in parts},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    result = measure(adapter, args.shape, args.context_tokens, args.chunk_tokens, args.ratio, args.rounds)
    result |= circumstances(command_of(args))
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
