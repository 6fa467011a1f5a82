"""How a second training, from another seed, scores beside the shipped model: the same prompts under full attention.

    .venv/bin/python lab/experiments/second_run.py lab/training/runs/second/reference/model --output lab/results/second_run.json

Prompts, answers and metrics are those of `kvweave eval --suite full --split test`, without any recipe beside full attention; what the
shipped model scores is read from lab/results/quality.json. Interrupted, the same command with the same `--work` goes on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from answered import answer
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.results import FULL
from kvweave_lab.eval.samples import Setting, generate
from kvweave_lab.eval.statistics import interval_over_tasks
from measured import arguments, circumstances, keep, started

QUALITY = Path(__file__).parents[1] / "results" / "quality.json"
SEED = 0

Full = Mapping[tuple[int, str], Mapping[str, Any]]
"""The shipped model's rows under full attention, by length and task."""


def asked(quality: Mapping[str, Any], tasks: Sequence[str]) -> Full:
    """The rows of some tasks; raises InvalidRequest for one that the shipped model was not measured on."""
    found = {(one["context_tokens"], one["task"]): one for one in quality["rows"] if one["recipe"] == FULL}
    missing = {*tasks} - {task for _, task in found}
    if missing:
        raise InvalidRequest(
            f"{QUALITY.name} has no scores of {', '.join(sorted(missing))}; name other tasks"
        )
    return {(length, task): one for (length, task), one in sorted(found.items()) if task in tasks}


def scores(adapter: Adapter, quality: Mapping[str, Any], length: int, task: str, samples: int) -> list[float]:
    """One task's, prompt by prompt."""
    split = quality["split"]
    setting = Setting(split, SEED, length, quality["chunk_tokens"])
    made = generate(task, setting, samples, token_count(adapter), Haystack.of_split(split))
    return [
        METRICS[one.metric](answer(adapter, one.question, one.chunks, one.max_new_tokens), one.answers)
        for one in made
    ]


def compared(
    adapter: Adapter, quality: Mapping[str, Any], full: Full, work: Path
) -> Iterator[dict[str, Any]]:
    """A row for every length and task; what is in the folder is not asked again."""
    for (length, task), first in full.items():
        kept = work / f"{adapter.fingerprint.digest}-{length}-{task}.json"
        if not kept.exists():
            made = scores(adapter, quality, length, task, first["samples"])
            write_atomically(kept, [json.dumps(made).encode()])
        second = interval_over_tasks([json.loads(kept.read_text())])
        yield {
            "context_tokens": length,
            "task": task,
            "prompts": first["samples"],
            "first": [first["score"], *first["score_interval"]],
            "second": [round(value, 6) for value in (second.value, second.low, second.high)],
        }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path, help="folder of the second model, its training.json in it")
    parser.add_argument("--task", action="append", help="default: all that the shipped model was measured on")
    parser.add_argument("--work", type=Path, default=Path("second-run"), help="folder for single scores")
    args = parser.parse_args()
    quality = json.loads(QUALITY.read_text(encoding="utf-8"))
    tasks = args.task or sorted({one["task"] for one in quality["rows"]} - {"overall"})
    full = asked(quality, tasks)
    adapter = load_model(str(args.model), dtype=quality["dtype"])
    made = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    words = [f"lab/experiments/second_run.py {args.model}", *(f"--task {task}" for task in args.task or ())]
    found = {
        "digest": quality["digest"],
        "second_digest": adapter.fingerprint.digest,
        "training": made,
        "rows": list(compared(adapter, quality, full, args.work)),
        **circumstances(" ".join(words)),
    }
    keep(found, args.output)


if __name__ == "__main__":
    started(main)
