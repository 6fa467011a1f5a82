"""Latency of an evaluation's runs on a real shape: the same tokens placed, recomputed, prefilled and decoded.

    .venv/bin/kvweave eval --suite full --split test --output quality
    .venv/bin/python lab/experiments/replay.py quality --scale 2 --output lab/results/replay.json

The reference model's own latency says nothing (it is interpreter overhead), but its evaluation notes for every run how
many tokens were exact, stale, recomputed, fresh and decoded. Each recipe's mean trace is replayed on a model with
random weights, interleaved with full prefill of the same prompt; `--scale` multiplies all counts but the decoded ones.
Timed are placing stored KV, recomputing and prefilling rows, and decoding; neither loading KV from a store nor selecting
tokens is.
"""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from evaluated import read
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.shapes import random_model
from kvweave.types import ChunkKV
from kvweave_lab.eval.results import FULL, Label, Outcome
from measured import arguments, circumstances, computed_with, keep, started

Trace = Mapping[str, float]


def mean_traces(outcomes: Iterable[Outcome]) -> dict[tuple[int, Label], Trace]:
    """The mean trace of each context length, recipe and budget."""
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
    """Seconds to the first token and for all decoding after it."""
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
    began = time.perf_counter()
    kv_cache = adapter.new_cache(
        tokens, [PlacedSpan(ChunkKV(tuple(ids[:stored]), kv), 0, 0)] if stored else []
    )
    adapter.compute(kv_cache, ids, adapter.rows(computed))
    adapter.synchronize()
    first_s = time.perf_counter() - began
    for _ in range(round(trace["decoded"])):
        adapter.step(kv_cache, 7)
    adapter.synchronize()
    return first_s, time.perf_counter() - began - first_s


def measure(
    adapter: Adapter, traces: Mapping[tuple[int, Label], Trace], scale: float, repeats: int
) -> list[dict[str, Any]]:
    """A row for each trace, full attention's left out: it is measured beside every other one."""
    rows = []
    for (context_tokens, (recipe, ratio, coverage)), trace in traces.items():
        if recipe == FULL:
            continue
        plain = {"exact": 0.0, "stale": 0.0, "recomputed": 0.0, "decoded": 0.0}
        plain["fresh"] = trace["exact"] + trace["stale"] + trace["fresh"]
        rounds = [(replay(adapter, trace, scale), replay(adapter, plain, scale)) for _ in range(repeats + 1)]
        times = rounds[1:]  # the first warms up
        ratios = [ours[0] / full[0] for ours, full in times]
        rows.append(
            {
                "context_tokens": context_tokens,
                "recipe": recipe,
                "ratio": ratio,
                "coverage": coverage,
                "trace": {name: round(count, 1) for name, count in trace.items()},
                "ttft_s": statistics.median(ours[0] for ours, _ in times),
                "full_ttft_s": statistics.median(full[0] for _, full in times),
                "decode_s": statistics.median(ours[1] for ours, _ in times),
                "ttft_over_full": statistics.median(ratios),
                "ttft_over_full_range": [min(ratios), max(ratios)],
            }
        )
    return rows


def result(folders: list[Path], shape: str, scale: float, repeats: int) -> dict[str, Any]:
    """Everything that is kept; raises InvalidRequest for an unknown shape and folders that do not belong together."""
    found = read(folders)
    adapter = random_model(shape)
    return {
        "shape": shape,
        **computed_with(adapter),
        "scale": scale,
        "repeats": repeats,
        "digest": found.subject["model"],
        "evaluations": found.commands,
        "rows": measure(adapter, mean_traces(found.outcomes), scale, repeats),
        **circumstances(
            f"lab/experiments/replay.py {' '.join(found.names)} --shape {shape} --scale {scale:g} --repeats {repeats}"
        ),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="what kvweave eval --output wrote")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    keep(result(args.folders, args.shape, args.scale, args.repeats), args.output)


if __name__ == "__main__":
    started(main)
