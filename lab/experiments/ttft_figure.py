"""Draws several measurements of `kvweave bench ttft` as one figure, with a panel for each context length.

.venv/bin/python lab/experiments/ttft_figure.py lab/results/ttft_limit_*k.json --image docs/images/ttft.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiment import run_script
from kvweave_lab.bench.measurement import MedianRange
from kvweave_lab.bench.plots import ttft_plot
from kvweave_lab.bench.ttft import TtftBench, TtftRange, TtftRow, TtftSettings


def merge(measurements: list[dict[str, Any]]) -> TtftBench:
    """Return all rows, shortest context first, with the settings of the first measurement."""
    rows = [TtftRow(**row) for one in measurements for row in one["rows"]]
    ranges = [
        TtftRange(**{**own, **{name: MedianRange(**own[name]) for name in ("ttft_s", "speedup")}})
        for one in measurements
        for own in one["spreads"]
    ]
    pairs = sorted(zip(rows, ranges, strict=True), key=lambda pair: pair[0].context_tokens)
    settings = TtftSettings(**measurements[0]["settings"])
    return TtftBench(settings, tuple(row for row, _ in pairs), tuple(own for _, own in pairs), ())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--image", type=Path, required=True)
    args = parser.parse_args()
    measurements = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    args.image.write_bytes(ttft_plot(merge(measurements)))


if __name__ == "__main__":
    run_script(main)
