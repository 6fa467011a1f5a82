"""bench steady: whether speed-up lasts over hundreds of novel questions."""

import json as jsons
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_output
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.steady_results import SteadyBench


@keeps_output
def steady(
    shape: bench.Shape = None,
    model: bench.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    queries: Annotated[int, typer.Option("--queries", min=4, help="Questions.")] = 300,
    chunks_per_query: Annotated[int, typer.Option("--chunks-per-query", min=1)] = 8,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of one chunk.")] = 512,
    known_chunks: Annotated[
        int, typer.Option("--known-chunks", min=1, help="How many there are beforehand.")
    ] = 1000,
    shared_chunks: Annotated[
        int, typer.Option("--shared-chunks", min=1, help="How many come later and are shared.")
    ] = 500,
    exponent: Annotated[float, typer.Option("--exponent", min=0, help="Of popularity.")] = 1.0,
    recipe: Annotated[str, typer.Option("--recipe", "--select")] = "prophetkv",
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of stale context to recompute.")
    ] = 0.15,
    host_limit: Annotated[
        str, typer.Option("--host-limit", help="Copies held in the process's memory: 500MB, 2GB.")
    ] = "2GB",
    page_cache: Annotated[
        bool,
        typer.Option(
            "--page-cache",
            help="Leave files in the page cache: for runs under a memory limit that counts it. Otherwise what the host "
            "tier does not hold comes from the disk.",
        ),
    ] = False,
    full_every: Annotated[
        int,
        typer.Option("--full-every", min=1, help="Full prefill is timed beside every so many-th question."),
    ] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    folder: bench.Folder = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Folder for steady.json and steady.png; an interrupted measurement goes on from there, and its chunk KV lies "
            "there until it is done.",
        ),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Speed-up over full prefill, question by question, over a growing store that memory cannot hold.

    No question comes twice. Speed that only warm caches give decays here.
    """
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.bench.queries import Traffic
    from kvweave_lab.bench.steady import bench_steady
    from kvweave_lab.bench.steady_results import SteadySettings

    opt.quiet_libraries()
    traffic = Traffic(
        queries=queries,
        chunks_per_query=chunks_per_query,
        known_chunks=known_chunks,
        shared_chunks=shared_chunks,
        exponent=exponent,
        seed=seed,
    )
    settings = SteadySettings(
        traffic, recipe, ratio, chunk_tokens, opt.size_bytes(host_limit), full_every, page_cache
    )
    adapter, name = bench.measured_model(shape, model, dtype, device or "auto")
    with _store_folder(output, folder) as place, progress_bar(quiet or json) as report:
        done = bench_steady(adapter, name, place, settings, output, report)
    _warn(done)
    content = _content(done)
    files = _write(output, done, content) if output else []
    if json:
        print_json(content)
        return
    STDOUT.print(_table(done))
    STDOUT.print(_said(done))
    for file in files:
        STDOUT.print(f"[dim]{file}[/]", soft_wrap=True)


@contextmanager
def _store_folder(output: Path | None, folder: Path | None) -> Iterator[Path]:
    """Where chunk KV lies: beside the report until that is done, or for as long as the command runs."""
    if output is not None:
        yield output / "store"
        shutil.rmtree(output / "store", ignore_errors=True)
        return
    with tempfile.TemporaryDirectory(prefix="kvweave-bench-", dir=folder) as place:
        yield Path(place)


def _warn(done: "SteadyBench") -> None:
    """Where the store fits into memory after all, the figures say little."""
    from kvweave.cli.output import STDERR, amount

    stored = done.rows[-1].stored_bytes
    if stored <= done.settings.host_bytes:
        STDERR.print(f"all {amount(stored)} fit into memory; give a smaller --host-limit or more chunks")
    elif done.settings.page_cache and stored <= (done.memory_limit_bytes or stored):
        STDERR.print(
            f"no memory limit below the {amount(stored)} that are stored: the page cache may hold them all; run this under "
            "one, for example `systemd-run --user --scope -p MemoryMax=4G kvweave bench steady …`"
        )


def _content(done: "SteadyBench") -> dict[str, Any]:
    """The measurement with its circumstances, as dictionaries."""
    from kvweave.engine.facts import facts
    from kvweave_lab.bench.circumstances import circumstances

    return {**facts(done), **facts(circumstances(bench.this_command()))}


def _write(folder: Path, done: "SteadyBench", content: dict[str, Any]) -> list[Path]:
    from kvweave_lab.bench.steady_plot import steady_plot

    numbers, plot = folder / "steady.json", folder / "steady.png"
    numbers.write_text(jsons.dumps(content, indent=2) + "\n", encoding="utf-8")
    plot.write_bytes(steady_plot(done))
    return [numbers, plot]


def _table(done: "SteadyBench") -> "Table":
    """A row for each quarter."""
    import statistics

    from rich.table import Table

    from kvweave.cli.output import amount, seconds

    asked, count = done.settings, len(done.rows)
    table = Table(
        box=None,
        header_style="bold",
        title=f"{done.shape}, {done.dtype}, {done.device}: {count:,} questions, {asked.recipe} at {asked.ratio:g}",
        title_justify="left",
    )
    for name in ("questions", "speedup", "ttft", "place", "from memory", "stored"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, speedup in enumerate(done.quarters):
        rows = done.rows[round(part * count / 4) : round((part + 1) * count / 4)]
        spans = sum(row.from_host + row.from_disk for row in rows)
        table.add_row(
            f"{rows[0].question + 1}–{rows[-1].question + 1}",
            f"{speedup:.2f}×",
            seconds(statistics.median(row.ttft_s for row in rows)),
            seconds(statistics.median(row.place_s for row in rows)),
            f"{sum(row.from_host for row in rows) / max(1, spans):.0%}",
            amount(rows[-1].stored_bytes),
        )
    return table


def _said(done: "SteadyBench") -> str:
    """What it comes to, and under which conditions."""
    from kvweave.cli.output import amount

    asked = done.settings
    reads = "" if asked.page_cache else ", files past the page cache"
    return (
        f"medians; the last quarter's speed-up is {done.kept:.2f} of the second's\n"
        f"{amount(done.rows[-1].stored_bytes)} stored, at most {amount(asked.host_bytes)} in memory{reads}"
    )
