"""Compares a model of a second training run, from another seed, with the shipped model, under full attention.

    .venv/bin/python lab/experiments/second_run.py lab/training/runs/second/reference/model --output lab/results/second_run.json

Prompts, answers and metrics are those of `kvweave eval --suite full --split test`, under full attention only. The shipped
model's scores come from lab/results/quality.json. An interrupted command resumes if it has the same `--work`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment import argument_parser, environment, plain_answer, run_script, write_result
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.outcomes import FULL
from kvweave_lab.eval.samples import SampleSpec, generate
from kvweave_lab.eval.world import Haystack
from kvweave_lab.statistics import interval_over_tasks

QUALITY = Path(__file__).parents[1] / "results" / "quality.json"
SEED = 0

FullRows = Mapping[tuple[int, str], Mapping[str, Any]]
"""The shipped model's rows under full attention, by length and task."""


def full_rows(quality: Mapping[str, Any], tasks: Sequence[str]) -> FullRows:
    """Return the shipped model's rows of some tasks; raises InvalidRequest for a task without a row."""
    found = {(one["context_tokens"], one["task"]): one for one in quality["rows"] if one["recipe"] == FULL}
    missing = {*tasks} - {task for _, task in found}
    if missing:
        raise InvalidRequest(
            f"{QUALITY.name} has no scores of {', '.join(sorted(missing))}; name other tasks"
        )
    return {(length, task): one for (length, task), one in sorted(found.items()) if task in tasks}


def scores(adapter: Adapter, quality: Mapping[str, Any], length: int, task: str, samples: int) -> list[float]:
    """Return one task's scores, prompt by prompt."""
    split = quality["split"]
    spec = SampleSpec(split, SEED, length, quality["chunk_tokens"])
    prompts = generate(task, spec, samples, token_count(adapter), Haystack.of_split(split))
    return [
        METRICS[one.metric](plain_answer(adapter, one.question, one.chunks, one.max_new_tokens), one.answers)
        for one in prompts
    ]


def compare(
    adapter: Adapter, quality: Mapping[str, Any], full: FullRows, work: Path
) -> Iterator[dict[str, Any]]:
    """Return a row for every length and task; computes the scores that the folder lacks."""
    for (length, task), first in full.items():
        path = work / f"{adapter.fingerprint.digest}-{length}-{task}.json"
        if not path.exists():
            computed = scores(adapter, quality, length, task, first["samples"])
            write_atomically(path, [json.dumps(computed).encode()])
        second = interval_over_tasks([json.loads(path.read_text())])
        yield {
            "context_tokens": length,
            "task": task,
            "prompts": first["samples"],
            "first": [first["score"], *first["score_interval"]],
            "second": [round(value, 6) for value in (second.value, second.low, second.high)],
        }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the second model, with its training.json")
    parser.add_argument("--task", action="append", help="default: all tasks with scores of the shipped model")
    parser.add_argument("--work", type=Path, default=Path("second-run"), help="folder for single scores")
    args = parser.parse_args()
    quality = json.loads(QUALITY.read_text(encoding="utf-8"))
    tasks = args.task or sorted({one["task"] for one in quality["rows"]} - {"overall"})
    full = full_rows(quality, tasks)
    adapter = load_model(str(args.model), dtype=quality["dtype"])
    training = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    words = [f"lab/experiments/second_run.py {args.model}", *(f"--task {task}" for task in args.task or ())]
    result = {
        "digest": quality["digest"],
        "second_digest": adapter.fingerprint.digest,
        "training": training,
        "rows": list(compare(adapter, quality, full, args.work)),
        **environment(" ".join(words)),
    }
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
