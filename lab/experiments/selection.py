"""Runs `kvweave eval selection` on the test split, and stores the numbers that lab/docs/selection.md quotes.

    .venv/bin/python lab/experiments/selection.py --work selection --output lab/results/selection.json --images docs/images

`--work` is the folder for complete reports and their figures. The page quotes means over four tasks with 50 prompts each;
its statements about single tasks are of 50 prompts. Two settings run at a time, each on one core.

What the worst 15 % of the tokens leave of a layer's deviation (FusionRAG fig. 3a) is a file of its own, with one run:

    .venv/bin/python lab/experiments/selection.py --left --work selection --output lab/results/deviation_left.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiment import environment, rounded, run_script
from kvweave.models.loading import load_model

ARGUMENTS = ("eval", "selection", "--split", "test", "--samples", "50", "--quiet")
"""With 50 prompts of each of four tasks, every mean over tasks is of 200 prompts."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "main": ("--answer", "0.1"),
    "short-chunks": ("--chunk-tokens", "48"),
    "long-chunks": ("--chunk-tokens", "192"),
    "long": ("--context-tokens", "1024"),
}
"""Options that differ from the defaults, 512 tokens in chunks of up to 96; the first setting is quoted in full."""

LEFT: Mapping[str, tuple[str, ...]] = {"left": ("--ratio", "0.15")}
"""The setting of FusionRAG fig. 3a."""

FIGURES = ("decoding-by-ratio", "decoding-by-layer", "loss-by-factor", "kv-deviation", "places")

Report = dict[str, Any]


def quoted(report: Report) -> Report:
    """Return the numbers of the first setting, over KV prepared in isolation, and the deviation of every kind of KV."""
    first = report["preparations"][0]
    overall, *tasks = first["layers"]
    stale = report["layer_curves"].index("stale")
    return {
        **{name: report[name] for name in ("model", "samples", "tasks", "ratios", "auxiliary", "answers")},
        **setting_summary(report),
        "selections": {
            name: {
                "of_optimal": first["of_optimal"][number],
                "loss_left": first["selection_loss"][number][nearest_ratio(report)],
                "depths": first["depths"][number],
                "chunks": first["chunks"][number],
            }
            for number, name in enumerate(report["selections"])
        },
        "factors": dict(zip(report["factors"], first["factor_loss"], strict=True)),
        "layers": dict(zip(report["layer_curves"], overall["curves"], strict=True)),
        "layers_by_task": {task["task"]: task["curves"][stale] for task in tasks},
        "agreement": first["agreement"],
        "deviation": {
            kind["name"]: {name: kind["deviation"][name] for name in ("relative", "depths", "chunks")}
            for kind in report["preparations"]
        },
    }


def setting_summary(report: Report) -> Report:
    """Return the numbers by which settings are compared."""
    first, auxiliary = report["preparations"][0], report["auxiliary"]
    decoding = report["selections"].index("decoding")
    return {
        **{name: report[name] for name in ("ratio", "context_tokens", "chunk_tokens", "samples")},
        "of_decoding": {
            name: first["overlap"][number][decoding] for number, name in enumerate(report["selections"])
        },
        "loss_left": first["selection_loss"][report["selections"].index("question_stale")][
            nearest_ratio(report)
        ],
        "last_layer_off": {
            kind["name"]: kind["deviation"]["relative"][-1] for kind in report["preparations"]
        },
        "auxiliary_kl": auxiliary["kl_difference"],
    }


def deviation_left(report: Report) -> Report:
    """Return by preparation and layer what is left of the deviation once its worst tokens are recomputed."""
    return {
        **{name: report[name] for name in ("model", "ratio", "context_tokens", "samples", "tasks")},
        "left": {kind["name"]: kind["deviation"]["left"] for kind in report["preparations"]},
    }


def nearest_ratio(report: Report) -> int:
    """Return the index of the curves' ratio nearest to the one of the selections."""
    return min(range(len(report["ratios"])), key=lambda index: abs(report["ratios"][index] - report["ratio"]))


def command(name: str, work: Path) -> list[str]:
    """Return the arguments of `kvweave` for a setting."""
    return [*ARGUMENTS, *{**SETTINGS, **LEFT}[name], "--output", str(work / name)]


def run_setting(name: str, work: Path) -> Report:
    """Run a setting and return its report."""
    subprocess.run(
        [sys.executable, "-m", "kvweave", *command(name, work)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    report: Report = json.loads((work / name / "selection.json").read_text(encoding="utf-8"))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for complete reports")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--images", type=Path, help="folder for the figures of the page")
    parser.add_argument(
        "--left", action="store_true", help="measure what the worst 15 %% of the tokens leave"
    )
    args = parser.parse_args()
    settings = LEFT if args.left else SETTINGS
    # The longest setting starts first.
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(run_setting, name, args.work) for name in reversed(settings)}
        try:
            reports = {name: running[name].result() for name in settings}
        except subprocess.CalledProcessError as error:
            pool.shutdown(cancel_futures=True)
            sys.exit(error.returncode)
    first, *others = settings
    named = Path(args.work.name)
    result = environment(f"lab/experiments/selection.py {'--left ' * args.left}--work {named}") | {
        "evaluations": [" ".join(["kvweave", *command(name, named)]) for name in settings],
        "digest": load_model().fingerprint.digest,
    }
    if args.left:
        result |= deviation_left(reports[first])
    else:
        result |= quoted(reports[first])
        result["others"] = [setting_summary(reports[name]) for name in others]
    text = json.dumps(rounded(result), indent=1) + "\n"
    print(text, end="")
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    for figure in FIGURES if args.images else ():
        shutil.copy(args.work / first / f"{figure}.png", args.images / f"selection-{figure}.png")


if __name__ == "__main__":
    run_script(main)
