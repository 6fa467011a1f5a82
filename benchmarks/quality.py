"""What the shipped reference model scores under every recipe, gathered from folders that `kvweave eval` wrote.

    .venv/bin/kvweave eval --suite full --split test --context-tokens 512 --output quality-512
    .venv/bin/kvweave eval --suite full --split test --context-tokens 2048 --output quality-2048
    .venv/bin/python benchmarks/quality.py quality-512 quality-2048 --output benchmarks/results/quality.json

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
from evaluated import read
from measured import circumstances

import kvweave
from kvweave.errors import InvalidRequest, KvweaveError
from kvweave.evaluation.report import first_look, to_json
from kvweave.evaluation.summary import OVERALL, rows
from kvweave.models.loading import load_model

SHIPPED = Path(kvweave.__file__).parent / "models" / "reference"
DIGITS = 6


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """Everything that is kept; raises InvalidRequest for folders that do not belong together."""
    found = read(folders)
    about = found.abouts[0]
    return {
        **circumstances(" ".join(["benchmarks/quality.py", *found.names])),
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
        "rows": [_rounded(row) for row in to_json(rows(found.outcomes))],
    }


def reference(found: dict[str, Any]) -> dict[str, Any]:
    """How the shipped model was made; raises InvalidRequest if it is not the one that was evaluated."""
    if load_model(dtype=str(found["dtype"])).fingerprint.digest != found["digest"]:
        raise InvalidRequest(
            f"the folders are about {found['model']}, which is not the reference model that ships now; evaluate that one"
        )
    training = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    facts = {name: training[name] for name in ("tokens", "hours", "steps", "device")}
    return {**facts, "bytes": (SHIPPED / "model.safetensors").stat().st_size}


def text(result: dict[str, Any]) -> str:
    """JSON with a line for each row, so that a new measurement reads well as a diff."""
    head = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=2)
    lines = ",\n".join(f"    {json.dumps(row)}" for row in result["rows"])
    return f'{head[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n'


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(row), parse_float=lambda number: round(float(number), DIGITS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="what kvweave eval --output wrote")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    try:
        result = gather(args.folders)
        result["reference"] = reference(result)
    except KvweaveError as error:
        sys.exit(str(error))
    prompts = min(row["samples"] for row in result["rows"] if row["task"] != OVERALL)
    print(first_look(prompts) or f"{prompts} prompts and more behind every figure", file=sys.stderr)
    print(text(result), end="")
    if args.output:
        args.output.write_text(text(result), encoding="utf-8")


if __name__ == "__main__":
    main()
