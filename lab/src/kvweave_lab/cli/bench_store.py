"""bench store: how fast stored chunk KV is there."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.spread import Spread
    from kvweave_lab.bench.store import StoreBench


@keeps_nothing
def store(
    shape: bench.Shape = None,
    model: bench.Model = None,
    dtype: opt.Dtype = None,
    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: all.")
    ] = None,
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", min=1, help="Tokens of stored KV.")
    ] = 4096,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of one entry.")] = 512,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is measured.")] = 9,
    full_rounds: Annotated[
        int, typer.Option("--full-rounds", min=0, help="In how many of these full prefill is timed as well.")
    ] = 3,
    catalog_entries: Annotated[
        int,
        typer.Option(
            "--catalog-entries",
            min=0,
            help="Entries of a catalogue that look-ups are timed in; 0 leaves it out.",
        ),
    ] = 100_000,
    folder: bench.Folder = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """How fast stored chunk KV is there, beside plain reads of the same bytes and beside computing it."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.engine.facts import facts
    from kvweave.types import STORAGES
    from kvweave_lab.bench.circumstances import circumstances
    from kvweave_lab.bench.store import bench_store

    opt.quiet_libraries()
    storages = opt.storages_named(storage or list(STORAGES))
    adapter, _ = bench.measured_model(shape, model, dtype, "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="kvweave-bench-", dir=folder) as place,
        progress_bar(quiet or json) as report,
    ):
        done = bench_store(
            adapter,
            Path(place),
            storages,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            rounds=rounds,
            full_rounds=full_rounds,
            catalog_entries=catalog_entries,
            progress=report,
        )
    if json:
        print_json({**facts(done), **facts(circumstances(bench.this_command()))})
        return
    STDOUT.print(_store_table(done))


def _store_table(done: "StoreBench") -> "Table":
    from rich.table import Table

    from kvweave.cli.output import amount, seconds

    full = f", full prefill {seconds(done.full_s.median)}" if done.full_s else ""
    table = Table(
        box=None,
        header_style="bold",
        title=f"{done.context_tokens:,} tokens of {done.model}, {done.dtype}{full}",
        title_justify="left",
        caption=f"medians of {done.rounds} rounds (smallest – largest){_looked_up(done)}",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for speed in done.storages:
        table.add_column(speed.storage, justify="right", no_wrap=True)

    def row(name: str, values: "list[Spread | None]", unit: str) -> None:
        table.add_row(name, *("–" if value is None else _said(value, unit) for value in values))

    table.add_row("size", *(amount(speed.bytes) for speed in done.storages))
    row("cold, plain read", [speed.plain_cold_s for speed in done.storages], "ms")
    row("cold, load and verify", [speed.cold_s for speed in done.storages], "ms")
    row("  until first layers", [speed.first_layer_s for speed in done.storages], "ms")
    row("warm, plain read", [speed.plain_warm_s for speed in done.storages], "ms")
    row("warm, load and verify", [speed.warm_s for speed in done.storages], "ms")
    row("place in a prompt", [speed.place_s for speed in done.storages], "ms")
    row("cold throughput, of plain", [speed.cold_throughput for speed in done.storages], "")
    row("warm time, of plain", [speed.warm_slowdown for speed in done.storages], "")
    row("cold + place, of prefill", [speed.of_prefill for speed in done.storages], "%")
    return table


def _looked_up(done: "StoreBench") -> str:
    """A line about the catalogue, if it was measured."""
    told = done.catalog
    if told is None:
        return ""
    times = "{:.2f} ms ({:.2f} – {:.2f})".format(
        *(1e3 * value for value in (told.look_up_s.median, told.look_up_s.low, told.look_up_s.high))
    )
    return (
        f"\none look-up of {told.spans} entries among {told.entries:,}: {times}, median of {told.look_ups:,}"
    )


def _said(value: "Spread", unit: str) -> str:
    scale, form = {"ms": (1e3, ".1f"), "%": (1e2, ".2f"), "": (1.0, ".2f")}[unit]
    median, low, high = (format(number * scale, form) for number in (value.median, value.low, value.high))
    return f"{median} {unit} ({low} – {high})".replace("  ", " ")
