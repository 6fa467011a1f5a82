"""Profiles a request: the time of its parts and of PyTorch's operations, compared with full prefill.

    .venv/bin/python lab/experiments/where_time_goes.py --output lab/results/where_time_goes.json

Parts are seconds without a profiler. Operations come from PyTorch's profiler, which adds overhead: their shares are more
reliable than their seconds. `wasted` is an operation's time beyond its share of full prefill's time. That share is the
share of attention's FLOPs that the request computes, or the share of rows for other operations. `kinds` are attention and
matrix products, with their FLOPs as in the limit of `kvweave bench ttft`.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile

from experiment import argument_parser, command_of, dtype_and_device, environment, run_script, write_result
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.recipe import run
from kvweave.recipes.request import PrefillResult
from kvweave.results import Timing
from kvweave_lab.bench.baselines import WorkCounter
from kvweave_lab.bench.measurement import MedianRange
from kvweave_lab.bench.workload import prompt_of_chunks
from kvweave_lab.shapes import random_model

PARTS = ("match_s", "place_s", "select_s", "recompute_s", "ttft_s")
OTHER = "other"
KINDS = {"attention": ("scaled_dot_product",), "matrices": ("aten::mm", "aten::addmm")}
"""Parts of the operations' names on a CPU. Soft-capped attention is not found: PyTorch has no operation for it."""


def operations(adapter: Adapter, step: Callable[[], object], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the seconds and calls of each operation in one run of a step, without the operations that it calls."""
    activities = [ProfilerActivity.CPU]
    on_device = adapter.geometry.device.type == "cuda"
    if on_device:
        activities.append(ProfilerActivity.CUDA)
    start = time.perf_counter()
    with profile(activities=activities) as profiled:
        for _ in range(rounds):
            step()
        adapter.synchronize()
    total_s = (time.perf_counter() - start) / rounds
    found = {}
    for event in profiled.key_averages():
        own_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        if own_us > 0:
            found[event.key] = (own_us / 1e6 / rounds, event.count / rounds)
    named_s = sum(seconds for seconds, _ in found.values())
    found[OTHER] = (max(0.0, total_s - named_s), 0.0)  # outside of PyTorch's operations
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
    """Return the result without the environment."""
    recipe, full = recipe_named(recipe_name), recipe_named("full")
    question = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt = adapter.template.render(question)
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder, limit_bytes=2**62) as store:
        prepare(adapter, store, question.chunks, recipe=recipe)

        def with_recipe() -> PrefillResult:
            return run(recipe, adapter, store, prompt, ratio=ratio)

        def full_prefill() -> PrefillResult:
            return run(full, adapter, store, prompt)

        plan = with_recipe().plan  # the first runs warm up
        full_prefill()
        timings, full_s = [], []
        for _ in range(rounds):
            timings.append(with_recipe().timing)
            full_s.append(full_prefill().timing.ttft_s)
        times, full_times = (
            operations(adapter, with_recipe, rounds),
            operations(adapter, full_prefill, rounds),
        )
        count = WorkCounter(adapter)
        flops, full_flops = flops_by_kind(count, with_recipe), flops_by_kind(count, full_prefill)
    rows = plan.recomputed_tokens + plan.fresh_tokens
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "recipe": recipe_name,
        "ratio": ratio,
        "context_tokens": context_tokens,
        "rows": rows,
        "prompt_tokens": prompt.tokens,
        "rounds": rounds,
        "full_s": MedianRange.of(full_s).median,
        "parts": {part: median(timings, part) for part in PARTS},
        "kinds": [
            {
                "kind": kind,
                "seconds": seconds_of(times, kind),
                "flops": flops[kind],
                "full_seconds": seconds_of(full_times, kind),
                "full_flops": full_flops[kind],
            }
            for kind in KINDS
            if seconds_of(times, kind) and seconds_of(full_times, kind)
        ],
        "operations": table(
            times, full_times, rows / prompt.tokens, flops["attention"] / full_flops["attention"], top
        ),
    }


def flops_by_kind(count: WorkCounter, step: Callable[[], object]) -> dict[str, float]:
    """Return the FLOPs of all passes of a step."""
    with count.record() as works:
        step()
    attention = sum(work.attention_flops for work in works)
    return {"attention": attention, "matrices": sum(work.flops for work in works) - attention}


def kind_of(operation: str) -> str | None:
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), None)


def seconds_of(times: Mapping[str, tuple[float, float]], kind: str) -> float:
    """Return the seconds of all operations of a kind."""
    return sum(seconds for name, (seconds, _) in times.items() if kind_of(name) == kind)


def median(timings: list[Timing], part: str) -> float:
    return MedianRange.of(getattr(timing, part) for timing in timings).median


def table(
    times: Mapping[str, tuple[float, float]],
    full_times: Mapping[str, tuple[float, float]],
    row_share: float,
    attention_share: float,
    top: int,
) -> list[dict[str, Any]]:
    """Return the longest operations, longest first, and the sum of all others."""
    total_s = sum(seconds for seconds, _ in times.values())
    longest = sorted(times, key=lambda name: -times[name][0])[:top]
    named = [(name, *times[name], full_times.get(name, (0.0, 0.0))[0]) for name in longest]
    rest_s = total_s - sum(seconds for _, seconds, _, _ in named)
    rest_full_s = sum(seconds for name, (seconds, _) in full_times.items() if name not in longest)
    return [
        {
            "operation": name,
            "seconds": seconds,
            "share": seconds / total_s,
            "calls": calls,
            "full_seconds": full_s,
            "wasted_s": seconds - (attention_share if kind_of(name) == "attention" else row_share) * full_s,
        }
        for name, seconds, calls, full_s in [*named, ("all others", rest_s, 0.0, rest_full_s)]
    ]


def main() -> None:
    parser = argument_parser(__doc__)
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
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
