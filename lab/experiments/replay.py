"""Measures the latency of an evaluation's runs on a real shape, with the same numbers of tokens.

    .venv/bin/kvweave eval --suite full --split test --output quality
    .venv/bin/python lab/experiments/replay.py quality --scale 2 --output lab/results/replay.json

The reference model is so small that its latency is mostly interpreter overhead. But an evaluation records for every run
how many tokens were exact, stale, recomputed, fresh and decoded. Each recipe's mean trace is replayed on a model with
random weights, interleaved with full prefill of the same prompt. `--scale` multiplies all counts except for the decoded
tokens. The times include placing stored KV, computing rows and decoding, but not loading KV or selecting tokens.
"""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval_folders import read_folders
from experiment import argument_parser, dtype_and_device, environment, run_script, write_result
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.types import ChunkKV
from kvweave_lab.eval.outcomes import FULL, Label, Outcome
from kvweave_lab.shapes import random_model

Trace = Mapping[str, float]


def mean_traces(outcomes: Iterable[Outcome]) -> dict[tuple[int, Label], Trace]:
    """Return the mean trace of each context length, recipe and budget."""
    groups: dict[tuple[int, Label], list[Trace]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.context_tokens, outcome.label), []).append(asdict(outcome.trace))
    return {
        key: {name: statistics.fmean(trace[name] for trace in groups[key]) for name in groups[key][0]}
        for key in sorted(groups, key=_order)
    }


def _order(key: tuple[int, Label]) -> tuple[int, str, bool, float]:
    context_tokens, (recipe, ratio, coverage) = key
    return context_tokens, recipe, coverage is not None, ratio if coverage is None else coverage


def replay(adapter: Adapter, trace: Trace, scale: float) -> tuple[float, float]:
    """Return the seconds to the first token, and for decoding after it."""
    stored, rows, tokens = (
        round(scale * count)
        for count in (
            trace["exact"] + trace["stale"],
            trace["recomputed"] + trace["fresh"],
            trace["exact"] + trace["stale"] + trace["fresh"],
        )
    )
    ids = [7 + number % 100 for number in range(tokens)]
    g = adapter.geometry
    kv = torch.zeros(g.layers, 2, g.kv_heads, stored, g.head_width, dtype=g.dtype)
    recomputed = torch.linspace(0, max(stored - 1, 0), max(rows - (tokens - stored), 0)).long()
    computed = torch.cat([recomputed, torch.arange(stored, tokens)]).unique()
    start = time.perf_counter()
    kv_cache = adapter.new_cache(
        tokens, [PlacedSpan(ChunkKV(tuple(ids[:stored]), kv), 0, 0)] if stored else []
    )
    adapter.compute(kv_cache, ids, adapter.rows(computed))
    adapter.synchronize()
    first_s = time.perf_counter() - start
    for _ in range(round(trace["decoded"])):
        adapter.step(kv_cache, 7)
    adapter.synchronize()
    return first_s, time.perf_counter() - start - first_s


def measure(
    adapter: Adapter, traces: Mapping[tuple[int, Label], Trace], scale: float, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each trace except for full attention's, which is the baseline of every row."""
    rows = []
    for (context_tokens, (recipe, ratio, coverage)), trace in traces.items():
        if recipe == FULL:
            continue
        full_trace = {"exact": 0.0, "stale": 0.0, "recomputed": 0.0, "decoded": 0.0}
        full_trace["fresh"] = trace["exact"] + trace["stale"] + trace["fresh"]
        rounds = [
            (replay(adapter, trace, scale), replay(adapter, full_trace, scale)) for _ in range(repeats + 1)
        ]
        times = rounds[1:]  # the first round warms up
        ratios = [own[0] / full[0] for own, full in times]
        rows.append(
            {
                "context_tokens": context_tokens,
                "recipe": recipe,
                "ratio": ratio,
                "coverage": coverage,
                "trace": {name: round(count, 1) for name, count in trace.items()},
                "ttft_s": statistics.median(own[0] for own, _ in times),
                "full_ttft_s": statistics.median(full[0] for _, full in times),
                "decode_s": statistics.median(own[1] for own, _ in times),
                "ttft_over_full": statistics.median(ratios),
                "ttft_over_full_range": [min(ratios), max(ratios)],
            }
        )
    return rows


def result(folders: list[Path], shape: str, scale: float, repeats: int) -> dict[str, Any]:
    """Return the result; raises InvalidRequest for an unknown shape and folders that must not be mixed."""
    contents = read_folders(folders)
    adapter = random_model(shape)
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "scale": scale,
        "repeats": repeats,
        "digest": contents.run_config["model"],
        "evaluations": contents.commands,
        "rows": measure(adapter, mean_traces(contents.outcomes), scale, repeats),
        **environment(
            f"lab/experiments/replay.py {' '.join(contents.names)} --shape {shape} --scale {scale:g} --repeats {repeats}"
        ),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders that kvweave eval --output wrote")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    write_result(result(args.folders, args.shape, args.scale, args.repeats), args.output)


if __name__ == "__main__":
    run_script(main)
