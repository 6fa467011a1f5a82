"""Collects the reference model's scores under every recipe from folders that `kvweave eval` wrote.

    .venv/bin/kvweave eval --suite full --split test --context-tokens 512 --output quality-512
    .venv/bin/kvweave eval --suite full --split test --context-tokens 2048 --output quality-2048
    .venv/bin/python lab/experiments/quality.py quality-512 quality-2048 --output lab/results/quality.json

The methods page needs more ratios and recipes; its figures are in docs/images:

    .venv/bin/kvweave eval --suite full --split test --ratio 0.05 --ratio 0.1 … --output methods-512
    .venv/bin/kvweave eval --suite full --split test --matrix --output matrix-512
    .venv/bin/python lab/experiments/quality.py methods-512 matrix-512 --output lab/results/methods.json --images docs/images

The tasks that favour no placement, which the methods page, README and the guide begin with, need each recipe on its own preparation and
on others (lab/results/neutral.json):

    .venv/bin/kvweave eval --suite full --split test --tasks neutral --ratio 0.1 … --output neutral
    .venv/bin/kvweave eval --suite full --split test --tasks neutral --ratio 0.1 --prepare following … --output neutral-following
    .venv/bin/python lab/experiments/quality.py neutral neutral-following --output lab/results/neutral.json

Chunks against the order of the text are measured in the same way (`--tasks permuted`, lab/results/permuted.json). What these recipes
store and run ahead, and what the model answers without any chunk, is measured apart and added to the result:

    .venv/bin/python lab/experiments/quality.py --complete lab/results/neutral.json

The cost of storing chunk KV in fewer bits (lab/docs/store.md) comes from evaluations with --storage:

    .venv/bin/kvweave eval --suite full --split test --context-tokens 512 --storage int8 --storage int4 … --output storage-512
    .venv/bin/python lab/experiments/quality.py storage-512 --output lab/results/storage.json

Rows are computed again from the outcomes: "overall" is the mean over the tasks of all folders. Run it on the machine of the
evaluation, since machine and threads are those of this process.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers

import kvweave
from eval_folders import EvalFolders, read_folders
from experiment import environment, rounded, run_script
from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.types import Prompt
from kvweave_lab.eval.comparisons import difference, matrices, storage_costs
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.grid import SUITES, Case, Suite, generated_cases
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.natural.offline_cost import measure_costs
from kvweave_lab.eval.outcomes import Label, Outcome
from kvweave_lab.eval.preparation import corpus_of
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.eval.report import matrix_json, rows_json, storages_json
from kvweave_lab.eval.rows import OVERALL, Row, summary_rows
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.tasks.mixed import PERMUTED
from kvweave_lab.eval.world import Haystack
from kvweave_lab.report import few_prompts_warning

SHIPPED = Path(kvweave.__file__).parent / "models" / "reference"
DEFAULT = "weave"


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the result; raises InvalidRequest for folders that must not be mixed."""
    contents = read_folders(folders)
    about = contents.abouts[0]
    rows = summary_rows(contents.outcomes)
    against = against_the_text(contents)
    return {
        **environment(" ".join(["lab/experiments/quality.py", *contents.names])),
        "date": contents.date,
        "versions": {
            "kvweave": about["version"],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **{name: about[name] for name in ("model", "dtype", "device", "split", "chunk_tokens")},
        "critical_layers": about["critical_layers"],
        "digest": contents.run_config["model"],
        "evaluations": contents.commands,
        "minutes": round(contents.minutes, 1),
        "rows": [rounded(row) for row in rows_json(rows)],
        "matrices": [rounded(matrix_json(matrix)) for matrix in matrices(contents.outcomes, rows)],
        "storages": [rounded(cost) for cost in storages_json(storage_costs(contents.outcomes))],
        "beside_own": [rounded(one) for one in gains_of_default(contents.outcomes)],
        **({"against": [rounded(row) for row in rows_json(against)]} if against else {}),
    }


def against_the_text(contents: EvalFolders) -> list[Row]:
    """Return rows over the permuted prompts whose two chunks are both there, the one that refers back before the other."""
    outcomes = [outcome for outcome in contents.outcomes if outcome.task in PERMUTED]
    if not outcomes:
        return []
    about = contents.abouts[0]
    suite = replace(
        SUITES["full"],
        tasks=tuple(dict.fromkeys(outcome.task for outcome in outcomes)),
        context_tokens=tuple(dict.fromkeys(outcome.context_tokens for outcome in outcomes)),
        seeds=tuple(about["seeds"]),
        chunk_tokens=about["chunk_tokens"],
        samples=about["samples"],
    )
    there = {
        case.sample.name
        for case in _cases(load_model(dtype=about["dtype"]), suite, about["split"])
        if not case.sample.placement.startswith("not retrieved")
    }
    rows = summary_rows([outcome for outcome in outcomes if outcome.sample in there])
    return [row for row in rows if row.task == OVERALL]


def _cases(adapter: Adapter, suite: Suite, split: str) -> Iterator[Case]:
    return generated_cases(suite, split, Haystack.of_split(split), token_count(adapter))


def gains_of_default(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the gain of kvweave's default recipe over every other at the same length and ratio, paired by prompt."""
    gains = []
    for length in sorted({outcome.context_tokens for outcome in outcomes}):
        labels: dict[Label, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.context_tokens == length:
                labels.setdefault(outcome.label, []).append(outcome)
        for (recipe, ratio, coverage), others in labels.items():
            own: Label = (DEFAULT, ratio, coverage)
            if recipe == DEFAULT or own not in labels:
                continue
            gain = difference([*labels[own], *others], own, (recipe, ratio, coverage))
            if gain is not None:
                gains.append(
                    {
                        "context_tokens": length,
                        "recipe": recipe,
                        "ratio": ratio,
                        "coverage": coverage,
                        "gain": gain.value,
                        "gain_interval": [gain.low, gain.high],
                    }
                )
    return gains


def draw(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write the figures of the methods page: scores over all tasks by ratio and by cost, and each matrix."""
    from kvweave_lab.eval.report.figures import pictures

    outcomes = read_folders(folders).outcomes
    rows = summary_rows(outcomes)
    over_all = [row for row in rows if row.task == OVERALL and "+" not in row.recipe]
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures(over_all, matrices(outcomes, rows)):
        if not picture.name.startswith("score-per-task"):
            paths.append(output / f"methods-{picture.name}.png")
            paths[-1].write_bytes(picture.light)
    return paths


def reference(result: dict[str, Any]) -> dict[str, Any]:
    """Return how the shipped model was trained; raises InvalidRequest if another model was evaluated."""
    if load_model(dtype=str(result["dtype"])).fingerprint.digest != result["digest"]:
        raise InvalidRequest(
            f"the folders are about {result['model']}, which is not the reference model that ships now; evaluate that one"
        )
    last = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    trainings = [last]
    while "earlier" in trainings[-1]:
        trainings.append(trainings[-1]["earlier"])
    totals = {name: sum(one[name] for one in trainings) for name in ("tokens", "hours", "steps")}
    return {**totals, "device": last["device"], "bytes": (SHIPPED / "model.safetensors").stat().st_size}


def completed(path: Path) -> dict[str, Any]:
    """Return a result with what each of its recipes stores and runs ahead, and with the scores without any chunk."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    adapter = load_model(dtype=result["dtype"])
    if adapter.fingerprint.digest != result["digest"]:
        raise InvalidRequest(
            f"{path} is about {result['model']}, which is not the reference model that ships now"
        )
    rows = result["rows"]
    suite = replace(
        SUITES["full"],
        tasks=tuple(dict.fromkeys(row["task"] for row in rows if row["task"] != OVERALL)),
        context_tokens=(min(row["context_tokens"] for row in rows),),
        chunk_tokens=result["chunk_tokens"],
        samples=rows[0]["samples"],
    )
    samples: dict[str, list[Sample]] = {}
    for case in _cases(adapter, suite, result["split"]):
        samples.setdefault(case.sample.task, []).append(case.sample)
    documents = [document for first, *_ in samples.values() for document in first.documents]
    chunks = [chunk for document in documents for chunk in document]
    names = dict.fromkeys(row["recipe"] for row in rows)
    corpus = corpus_of(adapter, documents)
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_costs(adapter, map(recipe_named, names), chunks, corpus, None, Path(folder))
    result["costs"] = [
        rounded({"recipe": name, "passes": cost.passes, "bytes_per_token": cost.bytes_per_token})
        for name, cost in costs.items()
    ]
    result["completed"] = {
        **environment(f"lab/experiments/quality.py --complete {path.name if path.is_absolute() else path}"),
        "chunks": len(chunks),
        "without_context": {task: mean(map(_alone(adapter), own)) for task, own in samples.items()},
    }
    return result


def _alone(adapter: Adapter) -> Callable[[Sample], float]:
    """Return a function that scores the answer to a sample's question without any chunk."""

    def score(sample: Sample) -> float:
        prompt = adapter.template.render(Prompt(sample.question))
        full = run(recipe_named("full"), adapter, MemoryStore(), prompt)
        start = (full.kv_cache, prompt.token_ids, full.logits)
        (reply,) = generate_together(adapter, [start], sample.max_new_tokens)
        return METRICS[sample.metric](reply.text.strip(), sample.answers)

    return score


def text(result: dict[str, Any]) -> str:
    """Return JSON with a line for each row, matrix, storage, comparison and cost, so that diffs are readable."""
    names = ("matrices", "storages", "beside_own", "costs", "against", "rows")
    lists = [name for name in names if name in result]
    head = json.dumps({name: value for name, value in result.items() if name not in lists}, indent=2)
    parts = [head[:-2]]
    for name in lists:
        lines = ",\n".join(f"    {json.dumps(one)}" for one in result[name])
        parts.append(f'  "{name}": [\n{lines}\n  ]' if lines else f'  "{name}": []')
    return ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", help="folders that kvweave eval --output wrote")
    parser.add_argument(
        "--complete", type=Path, help="result to which costs, and scores without context, are added"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--images", type=Path, help="folder for the figures of the methods page")
    args = parser.parse_args()
    if args.complete:
        args.complete.write_text(text(completed(args.complete)), encoding="utf-8")
        return
    if not args.folders:
        parser.error("name the folders of an evaluation, or a result with --complete")
    result = gather(args.folders)
    result["reference"] = reference(result)
    for path in draw(args.folders, args.images) if args.images else ():
        print(path, file=sys.stderr)
    prompts = min(row["samples"] for row in result["rows"] if row["task"] != OVERALL)
    print(few_prompts_warning(prompts) or f"every number is of at least {prompts} prompts", file=sys.stderr)
    print(text(result), end="")
    if args.output:
        args.output.write_text(text(result), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
