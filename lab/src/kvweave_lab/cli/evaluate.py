"""eval: what every recipe's answers are worth, in one command."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing, keeps_output
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from kvweave_lab.eval.evaluation import Evaluation
    from kvweave_lab.eval.suites import Suite

app = typer.Typer(name="eval", invoke_without_command=True)

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="KVWEAVE_MODEL",
        help="Hub id or local folder. Default: the shipped reference model.",
    ),
]
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
    typer.Option("--samples", min=1, help="Prompts per task, length and seed; of a file, the first so many."),
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
        "--output", help="Folder for JSON, plots and report; run again, it goes on where it stopped."
    ),
]
Suite_ = Annotated[
    str, typer.Option("--suite", help="What runs where no other option says so: quick or full.")
]


_GENERATED = ("task", "split", "seed", "haystack", "context_tokens")
"""Parameters that say which samples are generated."""


@app.callback()
@keeps_output
def evaluate(
    context: typer.Context,
    suite: Suite_ = "quick",
    model: Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "--select", help="Recipe to run; repeatable.")
    ] = None,
    prepare: Annotated[
        list[str] | None,
        typer.Option(
            "--prepare",
            help="Run recipes on chunks prepared so, instead of each recipe's own way; repeatable, to compare.",
        ),
    ] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="Run recipes on chunk KV stored as int8 or int4 beside exact KV; repeatable, to compare.",
        ),
    ] = None,
    auxiliary: opt.Auxiliary = None,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Every selecting recipe on every preparation, at ratio 0.15."),
    ] = False,
    ratio: Annotated[
        list[float] | None,
        typer.Option("--ratio", min=0, max=1, help="Share of stale context to recompute; repeatable."),
    ] = None,
    coverage: Annotated[
        list[float] | None,
        typer.Option(
            "--coverage",
            min=0,
            max=1,
            help="Recompute as few tokens as hold this share of all scores, from 2 % to half of them; repeatable.",
        ),
    ] = None,
    task: Tasks = None,
    seed: Seeds = None,
    samples: Samples = None,
    context_tokens: Lengths = None,
    chunk_tokens: ChunkTokens = None,
    split: Split = "dev",
    haystack: Haystack = None,
    ruler: Annotated[
        list[Path] | None, typer.Option("--ruler", help="RULER's jsonl, instead of tasks; repeatable.")
    ] = None,
    longbench: Annotated[
        list[Path] | None,
        typer.Option("--longbench", help="LongBench's jsonl, instead of tasks; repeatable."),
    ] = None,
    overlap: Annotated[
        int, typer.Option("--overlap", min=0, help="Tokens that chunks of a file's context share.")
    ] = 0,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Answers to a prompt generated together, each with KV of its own. Default: 8.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            help="Processes that answer prompts, each with the model. Default: a small model on the CPU gets one for each"
            " core, up to 8; others get one.",
        ),
    ] = None,
    output: Output = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run every recipe × budget × task × seed and compare the answers with full attention's."""
    given = _sources(context, "COMMANDLINE")
    if context.invoked_subcommand is not None:
        _refuse(given, given, f"it would be ignored before `{context.invoked_subcommand}`; put it behind")
        return
    files = (*(("ruler", path) for path in ruler or ()), *(("longbench", path) for path in longbench or ()))
    if files:
        _refuse(given, _GENERATED, "only for generated samples; leave it out, or the file")
    else:
        _refuse(given, ("overlap",), "only for --ruler and --longbench; leave it out")
    from kvweave.cli.output import print_json, progress_bar
    from kvweave_lab.eval.crew import Crew
    from kvweave_lab.eval.evaluation import Request, run_evaluation
    from kvweave_lab.eval.report import content, first_look

    chosen = _suite(
        suite,
        matrix,
        recipes=recipe,
        preparations=prepare,
        storages=storage,
        auxiliary=auxiliary,
        ratios=ratio,
        coverages=coverage,
        tasks=task,
        seeds=seed,
        samples=samples,
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
    )
    _tell_budgets(chosen.recipes, ratio or (), coverage or ())
    request = Request(
        suite=chosen,
        split=split,
        haystack=haystack,
        files=files,
        samples_per_file=samples,
        overlap_tokens=overlap,
        batch=batch,
        output=output,
        command=_command(context),
    )
    load = partial(_adapter, model, dtype, device)
    with progress_bar(quiet or json) as report:
        done = run_evaluation(load(), request, report, _tell, Crew(load, processes))
    if warning := first_look(min(row.samples for row in done.rows)):
        _tell(warning)
    if json:
        print_json(content(done.rows, done.about, done.matrices, done.storages))
    else:
        _show(done, matrix)


def _sources(context: typer.Context, source: str) -> list[str]:
    """The parameters whose values come from there: COMMANDLINE or ENVIRONMENT."""
    found = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, where in found if where is not None and where.name == source]


def _refuse(given: Iterable[str], among: Iterable[str], why: str) -> None:
    """Raise InvalidRequest naming the given options that are among those, if there are any."""
    wrong = [f"--{name.replace('_', '-')}" for name in given if name in among]
    if wrong:
        raise InvalidRequest(f"{', '.join(wrong)}: {why}")


def _tell(sentence: str) -> None:
    from rich.markup import escape

    from kvweave.cli.output import STDERR

    STDERR.print(escape(sentence), soft_wrap=True)


def _tell_budgets(recipes: Sequence[str], ratios: Sequence[float], coverages: Sequence[float]) -> None:
    """Say which recipes the asked budgets do not apply to."""
    from kvweave.recipes.methods import recipe_named

    selects = {name: recipe_named(name).select for name in recipes}
    between = [f"{ratio:g}" for ratio in ratios if 0 < ratio < 1]
    others = [name for name, select in selects.items() if not select.selects]
    if between and others:
        _tell(f"--ratio {', '.join(between)} does not apply to {', '.join(others)}, which select no tokens")
    others = [name for name, select in selects.items() if not select.adds_up]
    if coverages and others:
        asked = ", ".join(f"{coverage:g}" for coverage in coverages)
        _tell(
            f"--coverage {asked} does not apply to {', '.join(others)}: it takes scores that add up to a whole"
        )


def _suite(name: str, matrix: bool, **changes: Any) -> "Suite":
    """A named suite with what other options change in it."""
    from dataclasses import replace

    from kvweave_lab.eval.suites import matrix_of, selectors, storable, suite_named

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    chosen: Any = {key: value for key, value in given.items() if value is not None}
    suite = suite_named(name)
    if matrix:
        suite = matrix_of(suite)
    elif "preparations" in chosen:
        suite = replace(suite, recipes=selectors())
    if "storages" in chosen:
        suite = replace(suite, recipes=storable(suite.recipes))  # unless recipes were asked for as well
    if "coverages" in chosen and not matrix:
        suite = replace(suite, ratios=())  # unless ratios were asked for as well
    return replace(suite, **chosen)


def _adapter(model: str | None, dtype: str | None, device: str | None) -> Any:
    opt.quiet_libraries()
    from kvweave.models.loading import load_model

    return load_model(model, dtype=dtype or "auto", device=device or "auto")


def _command(context: typer.Context) -> str:
    """The command as it was given, with what the environment said of the model written out."""
    said = [name for name in _sources(context, "ENVIRONMENT") if name in ("model", "dtype", "device")]
    added = [word for name in said for word in (f"--{name}", str(context.params[name]))]
    return shlex.join(["kvweave", *sys.argv[1:], *added])


def _show(done: "Evaluation", matrix: bool) -> None:
    """The rows, or the matrices alone where they are what was asked for."""
    from kvweave.cli.output import STDOUT
    from kvweave_lab.eval.report import matrix_table, storage_table, table

    if not matrix:
        STDOUT.print(table(done.rows))
    for one in done.matrices:
        STDOUT.print(matrix_table(one))
    if done.storages:
        STDOUT.print(storage_table(done.storages))
    for path in done.files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


@app.command()
@keeps_nothing
def selection(
    model: Model = None,
    auxiliary: Annotated[
        str | None,
        typer.Option("--auxiliary", help="Model whose last layer is compared. Default: the shipped one."),
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    task: Tasks = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 0,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts per task.")] = 50,
    context_tokens: Lengths = None,
    chunk_tokens: Annotated[
        list[int] | None, typer.Option("--chunk-tokens", min=16, help="Largest chunk; repeatable.")
    ] = None,
    ratio: Annotated[float, typer.Option("--ratio", min=0, max=1, help="Share of tokens selected.")] = 0.2,
    answer: Annotated[
        list[float] | None,
        typer.Option("--answer", min=0, max=1, help="Also answer with this share recomputed; repeatable."),
    ] = None,
    split: Split = "dev",
    haystack: Haystack = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for JSON and figures; what is there is replaced.")
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Which tokens matter, and which selections find them: overlap, residual loss, deviation, layers, places."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.eval.report import first_look
    from kvweave_lab.eval.selection.sweep import Sweep, run_sweep, write
    from kvweave_lab.eval.selection.tables import sweep_table, tables

    sweep = Sweep(
        tasks=tuple(task or ("multikey", "twohop", "coref", "vartrack")),
        split=split,
        seed=seed,
        samples=samples,
        context_tokens=tuple(context_tokens or (512,)),
        chunk_tokens=tuple(chunk_tokens or (96,)),
        ratio=ratio,
        answered_ratios=tuple(answer or ()),
        haystack=haystack,
    )
    reader = _auxiliary(model, auxiliary, dtype, device)
    with progress_bar(quiet or json) as report:
        reports = run_sweep(_adapter(model, dtype, device), reader, sweep, report)
    files = write(output, reports) if output else []
    if left_out := sum(one.left_out for one in reports.values()):
        _tell(f"prompts left out because the model has no room for them: {left_out}")
    if warning := first_look(min(one.samples for one in reports.values())):
        _tell(warning)
    if json:
        print_json(reports)
        return
    for shown in [each for one in reports.values() for each in tables(one)]:
        STDOUT.print(shown)
    if len(reports) > 1:
        STDOUT.print(sweep_table(reports))
    for path in files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


def _auxiliary(model: str | None, auxiliary: str | None, dtype: str | None, device: str | None) -> Any:
    """The named auxiliary model, the shipped one beside the shipped reference, or none beside another model."""
    from kvweave.models.loading import AUXILIARY_NAME, REFERENCE_NAME

    if auxiliary is None and model not in (None, REFERENCE_NAME):
        return None
    return _adapter(auxiliary or AUXILIARY_NAME, dtype, device)
