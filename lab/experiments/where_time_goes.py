"""Where a request's time goes: its parts, and the operations that PyTorch spends it on, beside those of full prefill.

    .venv/bin/python lab/experiments/where_time_goes.py --output lab/results/where_time_goes.json

Parts are seconds without a profiler. Operations are counted by PyTorch's own, which slows everything down a little, so that
their shares say more than their seconds; `wasted` is what an operation takes beyond its share of full prefill's time: the share
of attention's FLOPs that the request has to compute, or, of everything else, the share of rows. `kinds` are attention and
products of matrices, each with its FLOPs, counted as for the limit of `kvweave bench ttft`.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.chunks_api import prepare
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.recipes.request import PrefillResult
from kvweave.types import Timing
from kvweave_lab.bench.prompts import prompt_of_chunks
from kvweave_lab.bench.spread import Spread
from kvweave_lab.bench.work import WorkCount
from measured import arguments, circumstances, command_of, computed_with, keep, started

PARTS = ("match_s", "place_s", "select_s", "recompute_s", "ttft_s")
OTHER = "other"
KINDS = {"attention": ("scaled_dot_product",), "matrices": ("aten::mm", "aten::addmm")}
"""What the names of their operations contain on a CPU; not where logits are soft-capped, which PyTorch has no operation for."""


def operations(adapter: Adapter, step: Callable[[], object], rounds: int) -> dict[str, tuple[float, float]]:
    """Of one run of a step: seconds and calls of each operation itself, without those it calls; and how long it took in all."""
    activities = [ProfilerActivity.CPU]
    on_device = adapter.geometry.device.type == "cuda"
    if on_device:
        activities.append(ProfilerActivity.CUDA)
    began = time.perf_counter()
    with profile(activities=activities) as seen:
        for _ in range(rounds):
            step()
        adapter.synchronize()
    whole_s = (time.perf_counter() - began) / rounds
    found = {}
    for event in seen.key_averages():
        own_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        if own_us > 0:
            found[event.key] = (own_us / 1e6 / rounds, event.count / rounds)
    named_s = sum(seconds for seconds, _ in found.values())
    found[OTHER] = (max(0.0, whole_s - named_s), 0.0)  # outside of PyTorch's operations
    return found


def measure(
    adapter: Adapter,
    shape: str,
    recipe_name: str,
    ratio: float,
    context_tokens: int,
    chunk_tokens: int,
    rounds: int,
    top: int,
) -> dict[str, Any]:
    """Everything that is kept but the circumstances."""
    recipe, full = recipe_named(recipe_name), recipe_named("full")
    asked = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt = adapter.template.render(asked)
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder, limit_bytes=2**62) as store:
        prepare(adapter, store, asked.chunks, recipe=recipe)

        def ours() -> PrefillResult:
            return run(recipe, adapter, store, prompt, ratio=ratio)

        def everything() -> PrefillResult:
            return run(full, adapter, store, prompt)

        plan = ours().plan  # the first runs warm up
        everything()
        timings, full_s = [], []
        for _ in range(rounds):
            timings.append(ours().timing)
            full_s.append(everything().timing.ttft_s)
        seen, seen_full = operations(adapter, ours, rounds), operations(adapter, everything, rounds)
        count = WorkCount(adapter)
        flops, full_flops = flops_by_kind(count, ours), flops_by_kind(count, everything)
    rows = plan.recomputed_tokens + plan.fresh_tokens
    return {
        "shape": shape,
        **computed_with(adapter),
        "recipe": recipe_name,
        "ratio": ratio,
        "context_tokens": context_tokens,
        "rows": rows,
        "prompt_tokens": prompt.tokens,
        "rounds": rounds,
        "full_s": Spread.of(full_s).median,
        "parts": {part: median(timings, part) for part in PARTS},
        "kinds": [
            {
                "kind": kind,
                "seconds": seconds_of(seen, kind),
                "flops": flops[kind],
                "full_seconds": seconds_of(seen_full, kind),
                "full_flops": full_flops[kind],
            }
            for kind in KINDS
            if seconds_of(seen, kind) and seconds_of(seen_full, kind)
        ],
        "operations": table(
            seen, seen_full, rows / prompt.tokens, flops["attention"] / full_flops["attention"], top
        ),
    }


def flops_by_kind(count: WorkCount, step: Callable[[], object]) -> dict[str, float]:
    """Of all passes of a step."""
    with count.counting() as works:
        step()
    attention = sum(work.attention_flops for work in works)
    return {"attention": attention, "matrices": sum(work.flops for work in works) - attention}


def kind_of(operation: str) -> str | None:
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), None)


def seconds_of(seen: Mapping[str, tuple[float, float]], kind: str) -> float:
    """Of all operations of a kind."""
    return sum(seconds for name, (seconds, _) in seen.items() if kind_of(name) == kind)


def median(timings: list[Timing], part: str) -> float:
    return Spread.of(getattr(timing, part) for timing in timings).median


def table(
    seen: Mapping[str, tuple[float, float]],
    seen_full: Mapping[str, tuple[float, float]],
    row_share: float,
    attention_share: float,
    top: int,
) -> list[dict[str, Any]]:
    """The operations that take longest, longest first, and what the rest takes together."""
    whole_s = sum(seconds for seconds, _ in seen.values())
    longest = sorted(seen, key=lambda name: -seen[name][0])[:top]
    named = [(name, *seen[name], seen_full.get(name, (0.0, 0.0))[0]) for name in longest]
    rest_s = whole_s - sum(seconds for _, seconds, _, _ in named)
    rest_full_s = sum(seconds for name, (seconds, _) in seen_full.items() if name not in longest)
    return [
        {
            "operation": name,
            "seconds": seconds,
            "share": seconds / whole_s,
            "calls": calls,
            "full_seconds": full_s,
            "wasted_s": seconds - (attention_share if kind_of(name) == "attention" else row_share) * full_s,
        }
        for name, seconds, calls, full_s in [*named, ("all others", rest_s, 0.0, rest_full_s)]
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--recipe", default="prophetkv")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    result = measure(
        adapter,
        args.shape,
        args.recipe,
        args.ratio,
        args.context_tokens,
        args.chunk_tokens,
        args.rounds,
        args.top,
    )
    result |= circumstances(command_of(args))
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
