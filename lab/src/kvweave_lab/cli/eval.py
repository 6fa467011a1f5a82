"""eval: the command group `kvweave eval`, with `selection`; other files have the other commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli.bench_options import print_paths
from kvweave_lab.cli.eval_natural import natural
from kvweave_lab.cli.eval_prediction import prediction
from kvweave_lab.cli.eval_workloads import decode, lookalikes_command, personas
from kvweave_lab.cli.evaluate import (
    MODEL_TEXT,
    Haystack,
    Lengths,
    Split,
    Tasks,
    app,
    load_adapter,
    print_notice,
)

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave_lab.eval.selection.analysis import Sweep
    from kvweave_lab.eval.selection.report import SelectionReport


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """The options of `eval selection`: the models, the samples, and what is analysed."""

    model: Annotated[str | None, opt.declared("model", MODEL_TEXT)] = None
    auxiliary: Annotated[
        str | None,
        typer.Option("--auxiliary", help="Model whose last layer is compared. Default: the shipped one."),
    ] = None
    dtype: Annotated[str | None, opt.declared("dtype")] = None
    device: Annotated[str | None, opt.declared("device")] = None
    task: Tasks = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 0
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts per task.")] = 50
    context_tokens: Lengths = None
    chunk_tokens: Annotated[
        list[int] | None, typer.Option("--chunk-tokens", min=16, help="Largest chunk; repeatable.")
    ] = None
    ratio: Annotated[float, typer.Option("--ratio", min=0, max=1, help="Share of tokens selected.")] = 0.2
    answer: Annotated[
        list[float] | None,
        typer.Option("--answer", min=0, max=1, help="Also answer with this share recomputed; repeatable."),
    ] = None
    split: Split = "dev"
    haystack: Haystack = None
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for JSON and figures; replaces an earlier report.")
    ] = None

    def sweep(self) -> "Sweep":
        """Return the analysis that the options ask for."""
        from kvweave_lab.eval.selection.analysis import Sweep

        return Sweep(
            tasks=tuple(self.task or ("multikey", "twohop", "coref", "vartrack")),
            split=self.split,
            seed=self.seed,
            samples=self.samples,
            context_tokens=tuple(self.context_tokens or (512,)),
            chunk_tokens=tuple(self.chunk_tokens or (96,)),
            ratio=self.ratio,
            answered_ratios=tuple(self.answer or ()),
            haystack=self.haystack,
        )

    def load(self, model: str | None) -> "Adapter":
        """Load a model with the dtype and on the device of the options."""
        return load_adapter(opt.SharedOptions(model=model, dtype=self.dtype, device=self.device))

    def load_auxiliary(self) -> "Adapter | None":
        """Load the named auxiliary model, or the shipped one for the shipped reference model; None for another model."""
        from kvweave.models.loading import AUXILIARY_NAME, REFERENCE_NAME

        if self.auxiliary is None and self.model not in (None, REFERENCE_NAME):
            return None
        return self.load(self.auxiliary or AUXILIARY_NAME)


@app.command(short_help="Which tokens matter, and which recipes find them.")
@keeps_nothing
@opt.with_options()
def selection(*, options: SelectionOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Analyse which tokens matter and which selections find them: overlap, residual loss, deviation, layers, places."""
    from kvweave.cli.output import progress_bar
    from kvweave_lab.eval.selection.analysis import run_sweep
    from kvweave_lab.eval.selection.figures import write_reports

    sweep = options.sweep()
    auxiliary = options.load_auxiliary()
    with progress_bar(quiet or json) as progress:
        reports = run_sweep(options.load(options.model), auxiliary, sweep, progress)
    files = write_reports(options.output, reports) if options.output else []
    _show(reports, files, json=json)


def _show(reports: "Mapping[str, SelectionReport]", files: Sequence[Path], *, json: bool) -> None:
    from kvweave.cli.output import STDOUT, print_json
    from kvweave_lab.eval.selection.tables import sweep_table, tables
    from kvweave_lab.report import few_prompts_warning

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
    print_paths(files)


app.command("lookalikes", short_help="Which questions may share an answer.")(lookalikes_command)
app.command("personas", short_help="Compare whole systems of caches on the same users.")(personas)
app.command("decode", short_help="Every decoding strategy on long texts.")(decode)
app.command("natural", short_help="Every recipe on natural text that retrieval finds.")(natural)
app.command("prediction", short_help="Which questions are served from predictions.")(prediction)
