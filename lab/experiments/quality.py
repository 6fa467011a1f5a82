"""What the shipped reference model scores under every recipe, gathered from folders that `kvweave eval` wrote.

    .venv/bin/kvweave eval --suite full --split test --context-tokens 512 --output quality-512
    .venv/bin/kvweave eval --suite full --split test --context-tokens 2048 --output quality-2048
    .venv/bin/python lab/experiments/quality.py quality-512 quality-2048 --output lab/results/quality.json

The methods page is made from a wider grid, with its figures in docs/images:

    .venv/bin/kvweave eval --suite full --split test --ratio 0.05 --ratio 0.1 … --output methods-512
    .venv/bin/kvweave eval --suite full --split test --matrix --output matrix-512
    .venv/bin/python lab/experiments/quality.py methods-512 matrix-512 --output lab/results/methods.json --images docs/images

What storing chunk KV in fewer bits costs, lab/docs/store.md, comes from evaluations with --storage:

    .venv/bin/kvweave eval --suite full --split test --context-tokens 512 --storage int8 --storage int4 … --output storage-512
    .venv/bin/python lab/experiments/quality.py storage-512 --output lab/results/storage.json

Rows are computed anew from the outcomes, so that "overall" is the mean over the tasks of all folders. Run it where the
evaluation ran: machine and threads are those of this process.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvweave
from evaluated import read
from kvweave.errors import InvalidRequest
from kvweave.models.loading import load_model
from kvweave_lab.eval.comparison import difference
from kvweave_lab.eval.matrix import matrices
from kvweave_lab.eval.quantisation import storage_costs
from kvweave_lab.eval.report import first_look, matrix_json, to_json
from kvweave_lab.eval.report.storage_table import storages_json
from kvweave_lab.eval.results import Label, Outcome
from kvweave_lab.eval.summary import OVERALL, rows
from measured import circumstances, started

SHIPPED = Path(kvweave.__file__).parent / "models" / "reference"
DIGITS = 6
OWN = "weave"


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """Everything that is kept; raises InvalidRequest for folders that do not belong together."""
    found = read(folders)
    about = found.abouts[0]
    made = rows(found.outcomes)
    return {
        **circumstances(" ".join(["lab/experiments/quality.py", *found.names])),
        "date": found.date,
        "versions": {
            "kvweave": about["version"],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **{name: about[name] for name in ("model", "dtype", "device", "split", "chunk_tokens")},
        "digest": found.subject["model"],
        "evaluations": found.commands,
        "minutes": round(found.minutes, 1),
        "rows": [_rounded(row) for row in to_json(made)],
        "matrices": [_rounded(matrix_json(matrix)) for matrix in matrices(found.outcomes, made)],
        "storages": [_rounded(cost) for cost in storages_json(storage_costs(found.outcomes))],
        "beside_own": [_rounded(one) for one in beside_own(found.outcomes)],
    }


def beside_own(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """How much higher our own recipe scores than every other one at the same length and ratio, prompt by prompt."""
    found = []
    for length in sorted({outcome.context_tokens for outcome in outcomes}):
        labels: dict[Label, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.context_tokens == length:
                labels.setdefault(outcome.label, []).append(outcome)
        for (recipe, ratio, coverage), theirs in labels.items():
            own: Label = (OWN, ratio, coverage)
            if recipe == OWN or own not in labels:
                continue
            gain = difference([*labels[own], *theirs], own, (recipe, ratio, coverage))
            if gain is not None:
                found.append(
                    {
                        "context_tokens": length,
                        "recipe": recipe,
                        "ratio": ratio,
                        "coverage": coverage,
                        "gain": gain.value,
                        "gain_interval": [gain.low, gain.high],
                    }
                )
    return found


def draw(folders: Sequence[Path], output: Path) -> list[Path]:
    """The figures of the methods page: scores over all tasks by ratio and by cost, and each matrix."""
    from kvweave_lab.eval.report.plots import pictures

    found = read(folders).outcomes
    made = rows(found)
    over_all = [row for row in made if row.task == OVERALL and "+" not in row.recipe]
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures(over_all, matrices(found, made)):
        if not picture.name.startswith("score-per-task"):
            paths.append(output / f"methods-{picture.name}.png")
            paths[-1].write_bytes(picture.light)
    return paths


def reference(found: dict[str, Any]) -> dict[str, Any]:
    """How the shipped model was made; raises InvalidRequest if it is not the one that was evaluated."""
    if load_model(dtype=str(found["dtype"])).fingerprint.digest != found["digest"]:
        raise InvalidRequest(
            f"the folders are about {found['model']}, which is not the reference model that ships now; evaluate that one"
        )
    last = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    trainings = [last]
    while "earlier" in trainings[-1]:
        trainings.append(trainings[-1]["earlier"])
    whole = {name: sum(one[name] for one in trainings) for name in ("tokens", "hours", "steps")}
    return {**whole, "device": last["device"], "bytes": (SHIPPED / "model.safetensors").stat().st_size}


def text(result: dict[str, Any]) -> str:
    """JSON with a line for each row, matrix, storage and comparison, so that a new measurement reads well as a diff."""
    lists = ("matrices", "storages", "beside_own", "rows")
    head = json.dumps({name: value for name, value in result.items() if name not in lists}, indent=2)
    parts = [head[:-2]]
    for name in lists:
        lines = ",\n".join(f"    {json.dumps(one)}" for one in result[name])
        parts.append(f'  "{name}": [\n{lines}\n  ]' if lines else f'  "{name}": []')
    return ",\n".join(parts) + "\n}\n"


def _rounded(plain: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(plain), parse_float=lambda number: round(float(number), DIGITS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="what kvweave eval --output wrote")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--images", type=Path, help="folder for the figures of the methods page")
    args = parser.parse_args()
    result = gather(args.folders)
    result["reference"] = reference(result)
    for path in draw(args.folders, args.images) if args.images else ():
        print(path, file=sys.stderr)
    prompts = min(row["samples"] for row in result["rows"] if row["task"] != OVERALL)
    print(first_look(prompts) or f"{prompts} prompts and more behind every figure", file=sys.stderr)
    print(text(result), end="")
    if args.output:
        args.output.write_text(text(result), encoding="utf-8")


if __name__ == "__main__":
    started(main)
