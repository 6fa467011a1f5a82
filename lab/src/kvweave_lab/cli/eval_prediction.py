"""eval prediction: whether predicted questions serve the questions of the natural set."""

import datetime
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvweave.cli import options as opt
from kvweave.version import __version__
from kvweave_lab.cli import bench_options as bench
from kvweave_lab.cli.evaluate import MODEL_TEXT, print_notice

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.state.knowledge_base_state import Progress
    from kvweave_lab.eval.prediction.run import Figures, Request
SETTINGS = (*opt.MODEL, "embedding_model", "recipe", "chunk_tokens", "top_k")
"""The settings of the knowledge bases that can be given; one of them has another recipe."""

LINE_S: Final = 20.0
"""Seconds between lines of progress in a log."""


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """The options of `eval prediction` except the model's: documents, idle budget, questions."""

    documents: Annotated[
        int, typer.Option("--documents", min=1, help="Documents of the natural set in the knowledge base.")
    ] = 10
    predictions: Annotated[
        int,
        typer.Option(
            "--predictions",
            min=0,
            help="Number of questions that idle work may predict, including those that are dropped.",
        ),
    ] = 60
    split: Annotated[str, typer.Option("--split", help="dev (to tune on) or test (to report).")] = "dev"
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Number of the set's questions to ask. Default: all.")
    ] = None
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            min=0,
            max=3,
            help="Number of worked examples before the context; 0 uses the product's own prompt.",
        ),
    ] = 3
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.0,
            help="Begin nothing else after so many minutes, and report what is done. The same command with --output continues.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Folder for JSON and the knowledge bases. The same command resumes there."
        ),
    ] = None

    def request(self, model: opt.SharedOptions) -> "Request":
        """Return the evaluation that the options ask for."""
        from kvweave_lab.eval.prediction.run import Request

        settings = {name: getattr(model, name) for name in SETTINGS}
        return Request(
            self.documents,
            self.predictions,
            self.split,
            self.limit,
            self.examples,
            {name: value for name, value in settings.items() if value is not None},
            math.inf if self.minutes is None else self.minutes,
        )


@bench.keeps_output
@opt.with_options(*SETTINGS, model=MODEL_TEXT)
def prediction(
    *,
    model: opt.SharedOptions,
    options: PredictionOptions,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """The natural set's questions, written for kvweave, after a budget of idle work: share served from predictions, wrong answers, latency."""
    from kvweave.cli.output import STDERR, STDOUT, print_json, progress_bar
    from kvweave.results import facts
    from kvweave_lab.eval.natural.questions import shipped_set
    from kvweave_lab.eval.prediction.run import run
    from kvweave_lab.report import few_prompts_warning, json_bytes, write_files

    opt.quiet_libraries()
    request = options.request(model)
    logged = not (quiet or json or STDERR.is_terminal)
    with bench.temporary_folder(None) as temporary, progress_bar(quiet or json or logged) as bar:
        figures, outcomes, served, predictions = run(
            shipped_set(), request, options.output or temporary, _lines() if logged else bar
        )
    content: dict[str, Any] = {
        "about": {
            **bench.environment(),
            **{name: value for name, value in facts(request).items() if name != "minutes"},
            "version": __version__,
            "date": datetime.date.today().isoformat(),
        },
        "figures": facts(figures),
        "questions": facts(outcomes),
        "served": facts(served),
        "predicted questions": facts(predictions),
    }
    files = []
    if options.output is not None:
        files = write_files(options.output, {"prediction.json": json_bytes(content)})
    if warning := few_prompts_warning(figures.questions):
        print_notice(warning)
    if json:
        print_json(content)
        return
    STDOUT.print(_funnel_table(figures))
    if figures.systems:
        STDOUT.print(_table(figures))
    bench.print_paths(files)


def _lines() -> "Progress":
    """Return a callback that prints how far a stage is, at most every LINE_S seconds: for logs, which show no bar."""
    from kvweave.cli.output import STDERR

    printed_s = -LINE_S

    def report(stage: str, done: int, total: int) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= LINE_S:
            printed_s = time.monotonic()
            STDERR.print(f"{time.strftime('%H:%M:%S')} {stage}: {done} of {total}", highlight=False)

    return report


def _funnel_table(figures: "Figures") -> "Table":
    """Return a table of what is left of the set's questions from prediction to answer."""
    from kvweave_lab.report import text_table

    found = figures.funnel
    near = ", ".join(f"{number} at {least}" for least, number in found.within.items())
    judge = "not needed" if found.auc is None else f"AUC {found.auc:.2f}"
    table = text_table(
        ("", "questions", "right", "wrong", "KV ready"),
        title=f"From {found.questions} questions of the set to served ones",
        caption=f"nearest prediction within a cosine: {near}; judge: {judge}; kvweave's number is answer_error_bound",
    )
    table.add_row("predicted, by its answer", str(found.predicted), "", "", "")
    for name, count, right in (
        ("matched, or near and guarded", found.matched, found.matched_right),
        ("and held by the passages", found.held, found.held_right),
    ):
        table.add_row(name, str(count), str(right), str(count - right), "")
    for row in found.rows:
        counts = (row.right + row.wrong, row.right, row.wrong)
        table.add_row(f"served: {row.system}", *map(str, counts), f"{row.ready:.0%}")
    return table


def _table(figures: "Figures") -> "Table":
    """Return a table of the systems, whose caption has the results of idle work."""
    from kvweave.cli.output import seconds
    from kvweave_lab.report import text_table

    kept = ", ".join(f"{number} from {origin}" for origin, number in figures.predicted.items()) or "none"
    dropped = ", ".join(f"{number} {reason}" for reason, number in figures.dropped.items()) or "none"
    idle = ", ".join(f"{kind} {seconds(took)}" for kind, took in figures.idle_s.items()) or "none"
    table = text_table(
        ("", "predicted", "asked", "wrong", "worse", "KV ready", "of its tokens", "right", "mean", "idle"),
        title=f"{figures.questions} questions of the set",
        caption=f"predicted: {kept}; dropped: {dropped}; idle work: {idle}",
    )
    for each in figures.systems:
        stored = (each.served, each.served_asked, each.wrong, each.worse)
        shown = (f"{share:.1%}" for share in (*stored, each.ready, each.ready_tokens, each.contains))
        table.add_row(each.system, *shown, f"{each.mean_s:.3f} s", seconds(each.idle_s))
    return table
