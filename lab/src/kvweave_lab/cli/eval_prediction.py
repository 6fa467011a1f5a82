"""eval prediction: whether predicted questions serve the questions that people ask."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave import __version__
from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_output
from kvweave_lab.cli import bench_options as bench
from kvweave_lab.cli.evaluate import MODEL_TEXT, print_notice

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.eval.prediction.run import Figures, Request
SETTINGS = (*opt.MODEL, "embedding_model", "recipe", "chunk_tokens", "top_k")
"""The settings of both knowledge bases that can be given."""


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """The options of `eval prediction` beside the model: documents, idle budget, questions."""

    documents: Annotated[
        int, typer.Option("--documents", min=1, help="Documents of the natural set in the knowledge base.")
    ] = 10
    predictions: Annotated[
        int,
        typer.Option("--predictions", min=0, help="Idle budget: questions that are predicted and answered."),
    ] = 60
    split: Annotated[str, typer.Option("--split", help="dev (to tune on) or test (to report).")] = "dev"
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Questions of people. Default: all.")
    ] = None
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            min=0,
            max=3,
            help="Worked examples before the context; 0: the product's own prompt.",
        ),
    ] = 3
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Folder for JSON and the knowledge bases. The same command resumes there."
        ),
    ] = None

    def request(self, model: opt.SharedOptions) -> "Request":
        """Return what to run."""
        from kvweave_lab.eval.prediction.run import Request

        settings = {name: getattr(model, name) for name in SETTINGS}
        return Request(
            self.documents,
            self.predictions,
            self.split,
            self.limit,
            self.examples,
            {name: value for name, value in settings.items() if value is not None},
        )


@keeps_output
@opt.with_options(*SETTINGS, model=MODEL_TEXT)
def prediction(
    *,
    model: opt.SharedOptions,
    options: PredictionOptions,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """People's questions after a budget of idle work: share served from predictions, wrong answers, latency."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.engine.facts import facts
    from kvweave_lab.eval.natural.questions import shipped_set
    from kvweave_lab.eval.prediction.run import run
    from kvweave_lab.report import few_prompts_warning, json_bytes, write_files

    opt.quiet_libraries()
    request = options.request(model)
    with bench.temporary_folder(None) as temporary, progress_bar(quiet or json) as progress:
        figures, outcomes = run(shipped_set(), request, options.output or temporary, progress)
    content: dict[str, Any] = {
        "about": {
            **bench.environment(),
            **facts(request),
            "version": __version__,
            "date": datetime.date.today().isoformat(),
        },
        "figures": facts(figures),
        "questions": facts(outcomes),
    }
    files = []
    if options.output is not None:
        files = write_files(options.output, {"prediction.json": json_bytes(content)})
    if warning := few_prompts_warning(figures.questions):
        print_notice(warning)
    if json:
        print_json(content)
        return
    STDOUT.print(_table(figures))
    bench.print_paths(files)


def _table(figures: "Figures") -> "Table":
    """Return the figures of both arms, and in the caption what idle work did."""
    from kvweave.cli.output import seconds
    from kvweave_lab.report import text_table

    kept = ", ".join(f"{number} from {origin}" for origin, number in figures.predicted.items()) or "none"
    dropped = ", ".join(f"{number} {reason}" for reason, number in figures.dropped.items()) or "none"
    caption = f"{seconds(figures.idle_s)} of idle work; predicted: {kept}; dropped: {dropped}"
    table = text_table(
        ("", "served", "wrong", "KV ready", "right", "mean"),
        title=f"{figures.questions} questions of people",
        caption=caption,
    )
    for arm in figures.mean_s:
        own = arm == "predicted"
        table.add_row(
            "with predictions" if own else "without",
            f"{figures.served:.1%}" if own else "–",
            f"{figures.wrong:.1%}" if own else "–",
            f"{figures.ready[arm]:.1%}",
            f"{figures.contains[arm]:.1%}",
            f"{figures.mean_s[arm]:.3f} s",
        )
    return table
