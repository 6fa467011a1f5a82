"""One figure of several measurements of `kvweave bench ttft`, a panel for each context.

.venv/bin/python lab/experiments/ttft_figure.py lab/results/ttft_limit_*k.json --image docs/images/ttft.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kvweave_lab.bench.spread import Spread
from kvweave_lab.bench.ttft_plot import ttft_plot
from kvweave_lab.bench.ttft_results import TtftBench, TtftRow, TtftSettings, TtftSpread
from measured import started


def read(told: list[dict[str, Any]]) -> TtftBench:
    """What was measured, shortest context first; settings are the first one's."""
    rows = [TtftRow(**row) for one in told for row in one["rows"]]
    spreads = [
        TtftSpread(**{**spread, **{name: Spread(**spread[name]) for name in ("ttft_s", "speedup")}})
        for one in told
        for spread in one["spreads"]
    ]
    pairs = sorted(zip(rows, spreads, strict=True), key=lambda pair: pair[0].context_tokens)
    settings = TtftSettings(**told[0]["settings"])
    return TtftBench(settings, tuple(row for row, _ in pairs), tuple(spread for _, spread in pairs), ())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--image", type=Path, required=True)
    given = parser.parse_args()
    told = [json.loads(path.read_text(encoding="utf-8")) for path in given.results]
    given.image.write_bytes(ttft_plot(read(told)))


if __name__ == "__main__":
    started(main)
