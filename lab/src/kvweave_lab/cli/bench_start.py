"""bench: the command that measures how long commands take to start."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.start import StartBench

SHOWN_FROM_S = 0.02


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The options of `bench start`: the commands' inputs, and the folder for results."""

    model: Annotated[
        str | None, typer.Option("--model", help="The model to ask. Default: the shipped reference model.")
    ] = None
    documents: Annotated[
        Path | None,
        typer.Option("--documents", help="Folder of documents to ask about. Default: the sample documents."),
    ] = None
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 8
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of times that each command is started.")
    ] = 5
    output: Annotated[Path | None, typer.Option("--output", help="Folder for start.json.")] = None


@keeps_nothing
@opt.with_options()
def start(*, options: StartOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Processor time of commands in new processes by part, compared with `import torch, transformers`."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.results import facts
    from kvweave.samples import DOCUMENTS
    from kvweave_lab.bench.start import StartSettings, bench_start
    from kvweave_lab.report import json_bytes, write_files

    settings = StartSettings(
        options.documents or DOCUMENTS, options.model, options.new_tokens, options.rounds
    )
    with bench.temporary_folder(None) as place, progress_bar(quiet or json) as report:
        done = bench_start(settings, place, report)
    content = {**facts(done), **bench.environment()}
    files = write_files(options.output, {"start.json": json_bytes(content)}) if options.output else []
    if json:
        print_json(content)
        return
    STDOUT.print(_table(done))
    bench.print_paths(files)


def _table(done: "StartBench") -> "Table":
    """Return a column for each command: its parts, then its sums."""
    from kvweave_lab.bench.start_trace import OWN_CODE
    from kvweave_lab.report import text_table

    table = text_table(
        ("processor seconds", *(row.command for row in done.rows)),
        caption=f"medians of {done.settings.rounds} new processes each, in turn; parts below {SHOWN_FROM_S} s are left out",
    )
    spent = {part: [row.parts.get(part, 0.0) for row in done.rows] for row in done.rows for part in row.parts}
    for part, values in sorted(spent.items(), key=lambda item: -max(item[1])):
        if max(values) >= SHOWN_FROM_S:
            table.add_row(part, *(f"{value:.2f}" if value else "" for value in values))
    table.add_section()
    table.add_row("all", *(f"{row.cpu_s.median:.2f}" for row in done.rows))
    table.add_row("ours", *(f"{row.own_s.median:.2f}" for row in done.rows))
    own = [sum(row.parts.get(part, 0.0) for part in OWN_CODE) for row in done.rows]
    table.add_row("of it kvweave's own code", *(f"{value:.2f}" for value in own))
    table.add_row("on the clock", *(f"{row.wall_s.median:.2f}" for row in done.rows))
    return table
