"""Which tokens matter to the shipped reference model: `kvweave eval selection` on the test split, and what of it is quoted.

    .venv/bin/python benchmarks/selection.py --work selection --output benchmarks/results/selection.json

`--work` is the folder for the whole report and its figures. The page docs/evaluation.md quotes the mean over tasks, each
figure from all prompts.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measured import circumstances, started

from kvweave.models.loading import load_model

ARGUMENTS = ("eval", "selection", "--split", "test", "--samples", "50", "--quiet")
"""50 prompts of each of four tasks: 200 behind every figure over all of them."""

DIGITS = 6

Report = dict[str, Any]


def quoted(report: Report) -> Report:
    """What the page says: selections, layers and the auxiliary model."""
    first = report["preparations"][0]
    decoding = report["selections"].index("decoding")
    near = min(range(len(report["ratios"])), key=lambda place: abs(report["ratios"][place] - report["ratio"]))
    overall, *_ = first["layers"]
    return {
        **{name: report[name] for name in ("model", "samples", "tasks", "ratio", "context_tokens")},
        "loss_ratio": report["ratios"][near],
        "selections": {
            name: {
                "of_decoding": first["overlap"][number][decoding],
                "loss_left": first["selection_loss"][number][near],
            }
            for number, name in enumerate(report["selections"])
        },
        "layers": dict(zip(report["layer_curves"], overall["curves"], strict=True)),
        "auxiliary": report["auxiliary"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the whole report")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    kvweave = [sys.executable, "-m", "kvweave"]
    done = subprocess.run([*kvweave, *ARGUMENTS, "--output", str(args.work)], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)
    report = json.loads((args.work / "selection.json").read_text(encoding="utf-8"))
    found = circumstances(" ".join(["benchmarks/selection.py", "--work", args.work.name])) | {
        "evaluation": " ".join(["kvweave", *ARGUMENTS, "--output", args.work.name]),
        "digest": load_model().fingerprint.digest,
        **quoted(report),
    }
    short = json.loads(json.dumps(found), parse_float=lambda number: round(float(number), DIGITS))
    text = json.dumps(short, indent=1) + "\n"
    print(text, end="")
    if args.output:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    started(main)
