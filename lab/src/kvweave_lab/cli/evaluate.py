"""eval: run every recipe on the same prompts and compare the answers with full attention's."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.errors import InvalidRequest
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave_lab.eval.evaluation import Evaluation, Request
    from kvweave_lab.eval.grid import Suite

app = typer.Typer(
    name="eval", short_help="Compare the recipes' answers with full attention's.", invoke_without_command=True
)

MODEL_TEXT = "Hub id, local folder, or the name of a real model (lab/docs/real-models.md). Default: the shipped reference model."

HOME_TEXT = "Folder with what `kvweave profile-layers` found. Default: the usual home folder."

Split = Annotated[
    str,
    typer.Option(
        "--split",
        help="Pool of names, phrases and haystacks: train, dev (to tune on), test (to report) or hidden.",
    ),
]
ChunkTokens = Annotated[int | None, typer.Option("--chunk-tokens", min=16, help="Largest chunk.")]
Samples = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="Prompts per task, length and seed; from a file, the first N."),
]
Lengths = Annotated[
    list[int] | None, typer.Option("--context-tokens", min=64, help="Length of the context; repeatable.")
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Task to run; repeatable.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Seed of the samples; repeatable.")]
Haystack = Annotated[
    Path | None, typer.Option("--haystack", help="Folder of .txt and .md files to hide facts in.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", help="Folder for JSON, plots and report; the same command resumes an interrupted run."
    ),
]
SuiteName = Annotated[str, typer.Option("--suite", help="Defaults of the other options: quick or full.")]


TaskSet = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        help="Set of tasks instead of single ones: neutral (distances drawn), permuted (chunks against the order of the text) or fixed (those of --suite full).",
    ),
]


_GENERATED = ("task", "tasks", "split", "seed", "haystack", "context_tokens")
"""Parameters of generated samples."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of `eval` except suite and model: the grid, the samples, and how they are run."""

    recipe: Annotated[list[str] | None, typer.Option("--recipe", help="Recipe to run; repeatable.")] = None
    prepare: Annotated[
        list[str] | None,
        typer.Option(
            "--prepare",
            help="Run recipes on chunks with this preparation instead of their own; repeatable, to compare.",
        ),
    ] = None
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="Also run recipes on chunk KV stored as int8 or int4; repeatable, to compare.",
        ),
    ] = None
    auxiliary: Annotated[str | None, opt.declared("auxiliary")] = None
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Every selecting recipe on every preparation, at ratio 0.15."),
    ] = False
    ratio: Annotated[
        list[float] | None,
        typer.Option("--ratio", min=0, max=1, help="Share of stale context to recompute; repeatable."),
    ] = None
    coverage: Annotated[
        list[float] | None,
        typer.Option(
            "--coverage",
            min=0,
            max=1,
            help="Recompute the fewest tokens that hold this share of all scores, from 2 % to half of them; repeatable.",
        ),
    ] = None
    task: Tasks = None
    tasks: TaskSet = None
    seed: Seeds = None
    samples: Samples = None
    context_tokens: Lengths = None
    chunk_tokens: ChunkTokens = None
    split: Split = "dev"
    haystack: Haystack = None
    ruler: Annotated[
        list[Path] | None, typer.Option("--ruler", help="RULER's jsonl instead of tasks; repeatable.")
    ] = None
    longbench: Annotated[
        list[Path] | None,
        typer.Option("--longbench", help="LongBench's jsonl instead of tasks; repeatable."),
    ] = None
    overlap: Annotated[
        int,
        typer.Option("--overlap", min=0, help="Tokens that neighbouring chunks of a file's context share."),
    ] = 0
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Answers to a prompt that are generated together, each with its own KV. Default: 8.",
        ),
    ] = None
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            help="Processes that answer prompts, each with the model. Default: one per core, up to 8, for a small model on"
            " the CPU; one for others.",
        ),
    ] = None
    output: Output = None

    @property
    def files(self) -> tuple[tuple[str, Path], ...]:
        """The benchmarks on disk, each after the name of its reader."""
        ruler, longbench = self.ruler or (), self.longbench or ()
        return (*(("ruler", path) for path in ruler), *(("longbench", path) for path in longbench))

    def suite(self, name: str) -> "Suite":
        """Return a named suite with the changes of the options; raises InvalidRequest for tasks named in two ways."""
        from kvweave_lab.eval.tasks import task_set

        if self.task and self.tasks:
            raise InvalidRequest("--task and --tasks both name the tasks; leave one of them out")
        return _suite(
            name,
            self.matrix,
            recipes=self.recipe,
            preparations=self.prepare,
            storages=self.storage,
            auxiliary=self.auxiliary,
            ratios=self.ratio,
            coverages=self.coverage,
            tasks=list(task_set(self.tasks)) if self.tasks else self.task,
            seeds=self.seed,
            samples=self.samples,
            context_tokens=self.context_tokens,
            chunk_tokens=self.chunk_tokens,
        )

    def request(self, suite: "Suite", command: str) -> "Request":
        """Return the evaluation that the options ask for."""
        from kvweave_lab.eval.evaluation import Request

        return Request(
            suite=suite,
            split=self.split,
            haystack=self.haystack,
            files=self.files,
            samples_per_file=self.samples,
            overlap_tokens=self.overlap,
            batch=self.batch,
            output=self.output,
            command=command,
        )


@app.callback()
@bench.keeps_output
@opt.with_options(*opt.MODEL, "home", model=MODEL_TEXT, home=HOME_TEXT)
def evaluate(
    context: typer.Context,
    suite: SuiteName = "quick",
    *,
    model: opt.SharedOptions,
    options: EvalOptions,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run every recipe × budget × task × seed and compare the answers with full attention's."""
    given = opt.given_by("COMMANDLINE", context)
    if context.invoked_subcommand is not None:
        _refuse(given, given, f"it would be ignored before `{context.invoked_subcommand}`; put it after")
        return
    if options.files:
        _refuse(given, _GENERATED, "only for generated samples; leave it out, or the file")
    else:
        _refuse(given, ("overlap",), "only for --ruler and --longbench; leave it out")
    from kvweave.cli.output import progress_bar
    from kvweave_lab.eval.evaluation import run_evaluation
    from kvweave_lab.eval.workers import Workers

    chosen = options.suite(suite)
    _note_budgets(chosen.recipes, options.ratio or (), options.coverage or ())
    request = options.request(chosen, _command(context))
    load = partial(load_adapter, model)
    with progress_bar(quiet or json) as report:
        done = run_evaluation(load(), request, report, print_notice, Workers(load, options.processes))
    _show(done, options.matrix, json=json)


def _refuse(given: Iterable[str], refused: Iterable[str], reason: str) -> None:
    """Raise InvalidRequest that names the given options among the refused ones, if there are any."""
    wrong = [f"--{name.replace('_', '-')}" for name in given if name in refused]
    if wrong:
        raise InvalidRequest(f"{', '.join(wrong)}: {reason}")


def print_notice(sentence: str) -> None:
    """Print a sentence to standard error, on one line."""
    from rich.markup import escape

    from kvweave.cli.output import STDERR

    STDERR.print(escape(sentence), soft_wrap=True)


def _note_budgets(recipes: Sequence[str], ratios: Sequence[float], coverages: Sequence[float]) -> None:
    """Print to which recipes the given budgets do not apply."""
    from kvweave.recipes.methods import recipe_named

    selects = {name: recipe_named(name).select for name in recipes}
    between = [f"{ratio:g}" for ratio in ratios if 0 < ratio < 1]
    others = [name for name, select in selects.items() if not select.selective]
    if between and others:
        print_notice(
            f"--ratio {', '.join(between)} does not apply to {', '.join(others)}, which select no tokens"
        )
    others = [name for name, select in selects.items() if not select.supports_coverage]
    if coverages and others:
        asked = ", ".join(f"{coverage:g}" for coverage in coverages)
        print_notice(
            f"--coverage {asked} does not apply to {', '.join(others)}: it takes scores that add up to a whole"
        )


def _suite(name: str, matrix: bool, **changes: Any) -> "Suite":
    """Return a named suite with the changes of other options."""
    from dataclasses import replace

    from kvweave_lab.eval.grid import matrix_of, selectors, storable, suite_named

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    chosen: Any = {key: value for key, value in given.items() if value is not None}
    suite = suite_named(name)
    if matrix:
        suite = matrix_of(suite)
    elif "preparations" in chosen:
        suite = replace(suite, recipes=selectors())
    if "storages" in chosen:
        suite = replace(suite, recipes=storable(suite.recipes))  # unless recipes are given too
    if "coverages" in chosen and not matrix:
        suite = replace(suite, ratios=())  # unless ratios are given too
    return replace(suite, **chosen)


def load_adapter(model: opt.SharedOptions) -> "Adapter":
    """Load the model that the options name, quietly."""
    opt.quiet_libraries()
    return model.load_model()


def _command(context: typer.Context) -> str:
    """Return the command as it was given, with the model options from the environment written out."""
    from_environment = [name for name in opt.given_by("ENVIRONMENT", context) if name in opt.MODEL]
    added = [word for name in from_environment for word in (f"--{name}", str(context.params[name]))]
    return shlex.join(["kvweave", *sys.argv[1:], *added])


def _show(done: "Evaluation", matrix: bool, *, json: bool) -> None:
    """Print the rows, or the matrices alone if the command asked for them; as JSON all of it."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave_lab.eval.report import content, matrix_table, rows_table, storage_table
    from kvweave_lab.report import few_prompts_warning

    if warning := few_prompts_warning(min(row.samples for row in done.rows)):
        print_notice(warning)
    if json:
        print_json(content(done.rows, done.about, done.matrices, done.storages))
        return
    if not matrix:
        STDOUT.print(rows_table(done.rows))
    for each in done.matrices:
        STDOUT.print(matrix_table(each))
    if done.storages:
        STDOUT.print(storage_table(done.storages))
    for path in done.files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)
