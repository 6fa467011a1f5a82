"""Recipe variants beside each other on prompts to tune on, with paired intervals against one of them.

    .venv/bin/python lab/experiments/experiments.py FILE.py --baseline prophetkv --ratio 0.05 0.1 --output experiments/
    .venv/bin/python lab/experiments/experiments.py FILE.py --baseline idea --only idea other --by-task --output experiments/

FILE.py has VARIANTS, a mapping of names to recipes; a name of a method or of PREPARATION+METHOD given as --baseline or
--also joins them:

    from dataclasses import replace
    from kvweave.recipes.methods import recipe_named
    from kvweave.recipes.prepare import Similar

    VARIANTS = {
        "prophetkv": recipe_named("prophetkv"),
        "prophetkv, 5 neighbours": replace(recipe_named("prophetkv"), prepare=Similar(5)),
    }

Prints Markdown, for lab/docs/experiments.md where negative results are kept as well. Outcomes stay in the output folder
under their variant's name: run again with more variants, ratios or prompts, only those are computed. Code is not
compared, only a recipe's own fields: after a change of code behind a variant give it another name. All eleven tasks, 50
prompts each, at 512 tokens are the default; the split is dev, and only that one is to tune on. By ratio, then by score;
`gain` is the mean over tasks of the score minus the baseline's at the same ratio, prompt by prompt; a baseline that has
only one ratio is compared with at all of them.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.comparison import difference
from kvweave_lab.eval.report import first_look
from kvweave_lab.eval.results import REUSE, Estimate, Outcome, Row
from kvweave_lab.eval.suites import Suite
from kvweave_lab.eval.summary import OVERALL, rows
from kvweave_lab.eval.tasks import TASKS
from measured import started
from side_by_side import Grid, run


@dataclass(frozen=True)
class FromFile:
    """The variants of a file, or those chosen, and recipes by their names."""

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
        raise InvalidRequest(f"{path} is no Python file; name one that has VARIANTS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    found: Mapping[str, Recipe] | None = getattr(module, "VARIANTS", None)
    if found is None:
        raise InvalidRequest(f"{path} has no VARIANTS; give it a mapping of names to recipes")
    return found


def overall(outcomes: Sequence[Outcome], made: Iterable[Row], baseline: str) -> list[str]:
    """A table over all tasks, by ratio and then by score."""
    lines = [
        "| variant | ratio | score | normalised | gain over `"
        + baseline
        + "` | context tokens computed | kl |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [row for row in made if row.task == OVERALL]
    theirs = [row.ratio for row in found if row.recipe == baseline]
    for row in sorted(found, key=lambda row: (row.ratio or 0.0, -row.score.value)):
        gain = None
        if row.recipe != baseline:
            at = row.ratio if len(theirs) > 1 else theirs[0]
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


def by_task(made: Sequence[Row]) -> list[str]:
    """Score of every variant and ratio, a column for each task."""
    tasks = list(dict.fromkeys(row.task for row in made))
    scores = {(row.recipe, row.ratio, row.task): row.score.value for row in made}
    lines = [f"| variant | ratio | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for recipe, ratio in sorted({(row.recipe, row.ratio or 0.0) for row in made}, key=lambda one: one[::-1]):
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
    variants = FromFile(args.file, tuple(args.only), (args.baseline, *args.also))
    return Grid(variants, suite, args.split, args.model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="has VARIANTS: names to recipes")
    parser.add_argument("--baseline", default=REUSE, help="variant or recipe that all are compared with")
    parser.add_argument("--also", nargs="+", default=[], help="recipes by name that run beside the variants")
    parser.add_argument("--only", nargs="+", default=[], help="variants of the file; all without it")
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--samples", type=int, default=50, help="prompts per task, length and seed")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--chunk-tokens", type=int, default=96)
    parser.add_argument("--split", default="dev", choices=["train", "dev"], help="never what is reported")
    parser.add_argument("--model", help="hub id or local folder; the shipped reference model without it")
    parser.add_argument("--processes", type=int, default=2, help="each takes a task at a time")
    parser.add_argument("--by-task", action="store_true", help="print every task's score as well")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of outcomes; goes on where it stopped"
    )
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    grid = _grid(args)
    print(f"{grid.prompts:,} prompts, at most {grid.answers:,} answers", file=sys.stderr)
    outcomes = run(grid, args.output, args.processes)
    for length in args.context_tokens:
        here = [outcome for outcome in outcomes if outcome.context_tokens == length]
        made = rows(here)
        least = min(row.samples for row in made if row.task != OVERALL)
        print(
            f"\n{length:,} tokens, split {args.split}, {least} prompts and more of each of {len(args.task)} tasks\n"
        )
        print("\n".join(overall(here, made, args.baseline)))
        if args.by_task:
            print("\n" + "\n".join(by_task(made)))
        print(first_look(least) or "", file=sys.stderr)


if __name__ == "__main__":
    started(main)
