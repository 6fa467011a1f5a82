"""Compares recipe variants on prompts of the development split, with paired intervals against one of them.

    .venv/bin/python lab/experiments/experiments.py FILE.py --baseline prophetkv --ratio 0.05 0.1 --output experiments/
    .venv/bin/python lab/experiments/experiments.py FILE.py --baseline idea --only idea other --by-task --output experiments/

FILE.py defines VARIANTS, a mapping of names to recipes. A method or PREPARATION+METHOD named by --baseline or --also
is added to them:

    from dataclasses import replace
    from kvweave.recipes.methods import recipe_named
    from kvweave.recipes.prepare import Similar

    VARIANTS = {
        "prophetkv": recipe_named("prophetkv"),
        "prophetkv, 5 neighbours": replace(recipe_named("prophetkv"), prepare=Similar(5)),
    }

The output is Markdown for lab/docs/experiments.md, which also lists negative results. Outcomes stay in the output folder
under their variant's name, so a run with more variants, ratios or prompts computes only the new ones. Definitions contain
a recipe's fields, not its code: after a change of code, give the variant another name. The default is 50 prompts of each
of all eleven tasks, at 512 tokens, from the split dev, which recipes are tuned on. Rows are ordered by ratio, then by
score. `gain` is the score minus the baseline's at the same ratio, paired by prompt, averaged over tasks. A baseline with a
single ratio is compared with variants at all ratios.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment import run_script
from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.comparisons import difference
from kvweave_lab.eval.grid import Suite
from kvweave_lab.eval.outcomes import REUSE, Outcome
from kvweave_lab.eval.rows import OVERALL, Row, summary_rows
from kvweave_lab.eval.tasks import TASKS
from kvweave_lab.report import few_prompts_warning
from kvweave_lab.statistics import Estimate
from recipe_grid import Grid, run


@dataclass(frozen=True)
class FileVariants:
    """All or some variants of a file, and recipes by name."""

    path: Path
    only: tuple[str, ...]
    named: tuple[str, ...]

    def __call__(self) -> Mapping[str, Recipe]:
        """Raises InvalidRequest for a file without VARIANTS and for names that it does not have."""
        variants = _variants(self.path)
        if unknown := [name for name in self.only if name not in variants]:
            raise InvalidRequest(f"{self.path} has no variant {unknown[0]!r}; it has {', '.join(variants)}")
        chosen = {name: variants[name] for name in self.only or variants}
        for name in self.named:
            chosen[name] = variants[name] if name in variants else recipe_named(name)
        return chosen


def _variants(path: Path) -> Mapping[str, Recipe]:
    spec = importlib.util.spec_from_file_location("variants", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidRequest(f"{path} is no Python file; name one that defines VARIANTS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    found: Mapping[str, Recipe] | None = getattr(module, "VARIANTS", None)
    if found is None:
        raise InvalidRequest(f"{path} has no VARIANTS; give it a mapping of names to recipes")
    return found


def overall(outcomes: Sequence[Outcome], rows: Iterable[Row], baseline: str) -> list[str]:
    """Return a table of means over all tasks, by ratio and then by score."""
    lines = [
        "| variant | ratio | score | normalised | gain over `"
        + baseline
        + "` | context tokens computed | kl |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [row for row in rows if row.task == OVERALL]
    baseline_ratios = [row.ratio for row in found if row.recipe == baseline]
    for row in sorted(found, key=lambda row: (row.ratio or 0.0, -row.score.value)):
        gain = None
        if row.recipe != baseline:
            at = row.ratio if len(baseline_ratios) > 1 else baseline_ratios[0]
            gain = difference(outcomes, (row.recipe, row.ratio, None), (baseline, at, None))
        cells = (
            f"`{row.recipe}`",
            f"{row.ratio:g}",
            _estimate(row.score),
            _estimate(row.normalised),
            _estimate(gain, "+.3f"),
            f"{row.rows.value:.0f}",
            f"{row.kl.value:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_task(rows: Sequence[Row]) -> list[str]:
    """Return a table of scores, a column for each task."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    scores = {(row.recipe, row.ratio, row.task): row.score.value for row in rows}
    lines = [f"| variant | ratio | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for recipe, ratio in sorted({(row.recipe, row.ratio or 0.0) for row in rows}, key=lambda one: one[::-1]):
        values = (f"{scores[recipe, ratio, task]:.2f}" for task in tasks)
        lines.append(f"| `{recipe}` | {ratio:g} | {' | '.join(values)} |")
    return lines


def _estimate(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:{form}} ({estimate.low:{form}} – {estimate.high:{form}})"


def _grid(args: argparse.Namespace) -> Grid:
    suite = Suite(
        tasks=tuple(args.task),
        context_tokens=tuple(args.context_tokens),
        chunk_tokens=args.chunk_tokens,
        recipes=(),
        ratios=tuple(args.ratio),
        seeds=tuple(args.seed),
        samples=args.samples,
    )
    variants = FileVariants(args.file, tuple(args.only), (args.baseline, *args.also))
    return Grid(variants, suite, args.split, args.model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file that defines VARIANTS, names to recipes")
    parser.add_argument("--baseline", default=REUSE, help="variant or recipe to compare with")
    parser.add_argument("--also", nargs="+", default=[], help="names of further recipes to run")
    parser.add_argument("--only", nargs="+", default=[], help="variants of the file; default all")
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--samples", type=int, default=50, help="prompts per task, length and seed")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--chunk-tokens", type=int, default=96)
    parser.add_argument(
        "--split", default="dev", choices=["train", "dev"], help="reported results use other splits"
    )
    parser.add_argument("--model", help="hub id or local folder; default the shipped reference model")
    parser.add_argument("--processes", type=int, default=2, help="each runs one task at a time")
    parser.add_argument("--by-task", action="store_true", help="print every task's score as well")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder of outcomes, from which an interrupted command resumes",
    )
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    grid = _grid(args)
    print(f"{grid.prompts:,} prompts, at most {grid.answers:,} answers", file=sys.stderr)
    outcomes = run(grid, args.output, args.processes)
    for length in args.context_tokens:
        of_length = [outcome for outcome in outcomes if outcome.context_tokens == length]
        rows = summary_rows(of_length)
        fewest = min(row.samples for row in rows if row.task != OVERALL)
        print(
            f"\n{length:,} tokens, split {args.split}, at least {fewest} prompts of each of {len(args.task)} tasks\n"
        )
        print("\n".join(overall(of_length, rows, args.baseline)))
        if args.by_task:
            print("\n" + "\n".join(by_task(rows)))
        print(few_prompts_warning(fewest) or "", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
