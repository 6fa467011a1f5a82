"""eval: the command group `kvweave eval`, with `selection`; other commands are in `evaluate.py` and `eval_workloads.py`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing
from kvweave_lab.cli.eval_workloads import decode, lookalikes, personas
from kvweave_lab.cli.evaluate import Haystack, Lengths, Model, Split, Tasks, app, load_adapter, print_notice

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter


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
        Path | None, typer.Option("--output", help="Folder for JSON and figures; replaces an earlier report.")
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Analyse which tokens matter and which selections find them: overlap, residual loss, deviation, layers, places."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.eval.selection.analysis import Sweep, run_sweep
    from kvweave_lab.eval.selection.figures import write_reports
    from kvweave_lab.eval.selection.tables import sweep_table, tables
    from kvweave_lab.report.tables import few_prompts_warning

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
    with progress_bar(quiet or json) as progress:
        reports = run_sweep(load_adapter(model, dtype, device), reader, sweep, progress)
    files = write_reports(output, reports) if output else []
    if left_out := sum(report.left_out for report in reports.values()):
        print_notice(f"prompts left out because they are too long for the model: {left_out}")
    if warning := few_prompts_warning(min(report.samples for report in reports.values())):
        print_notice(warning)
    if json:
        print_json(reports)
        return
    for table in [each for report in reports.values() for each in tables(report)]:
        STDOUT.print(table)
    if len(reports) > 1:
        STDOUT.print(sweep_table(reports))
    for path in files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


def _auxiliary(
    model: str | None, auxiliary: str | None, dtype: str | None, device: str | None
) -> "Adapter | None":
    """Load the named auxiliary model, or the shipped one for the shipped reference model; None for another model."""
    from kvweave.models.loading import AUXILIARY_NAME, REFERENCE_NAME

    if auxiliary is None and model not in (None, REFERENCE_NAME):
        return None
    return load_adapter(auxiliary or AUXILIARY_NAME, dtype, device)


app.command("lookalikes")(lookalikes)
app.command("personas")(personas)
app.command("decode")(decode)
