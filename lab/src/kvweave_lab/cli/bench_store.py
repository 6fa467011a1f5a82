"""bench: the commands that measure how stored KV is read: store and decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.decode.settings import OffloadSettings
    from kvweave.models.adapter import Adapter
    from kvweave_lab.bench.decode import DecodeCost
    from kvweave_lab.bench.measurement import MedianRange
    from kvweave_lab.bench.store import StoreBench


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of `bench store`: the stored KV, and the number of rounds."""

    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: all.")
    ] = None
    context_tokens: Annotated[int, typer.Option("--context-tokens", min=1, help="Tokens of stored KV.")] = (
        4096
    )
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of one entry.")] = 512
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 9
    full_rounds: Annotated[
        int, typer.Option("--full-rounds", min=0, help="Rounds that also time full prefill.")
    ] = 3
    catalog_entries: Annotated[
        int,
        typer.Option(
            "--catalog-entries",
            min=0,
            help="Entries of the catalogue that look-ups are timed in; 0 skips it.",
        ),
    ] = 100_000
    folder: bench.Folder = None


@keeps_nothing
@opt.with_options()
def store(
    *, model: bench.CpuModel, options: StoreOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """How fast stored chunk KV is loaded, compared with plain reads of the same bytes and with computing it."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.results import facts
    from kvweave.types import STORAGES
    from kvweave_lab.bench.store import bench_store

    opt.quiet_libraries()
    storages = bench.storages_named(options.storage or list(STORAGES))
    adapter, _ = model.load()
    with bench.temporary_folder(options.folder) as place, progress_bar(quiet or json) as report:
        done = bench_store(
            adapter,
            place,
            storages,
            context_tokens=options.context_tokens,
            chunk_tokens=options.chunk_tokens,
            rounds=options.rounds,
            full_rounds=options.full_rounds,
            catalog_entries=options.catalog_entries,
            progress=report,
        )
    if json:
        print_json({**facts(done), **bench.environment()})
        return
    STDOUT.print(_store_table(done))


def _store_table(done: "StoreBench") -> "Table":
    from kvweave.cli.output import amount, seconds
    from kvweave_lab.report import text_table

    full = f", full prefill {seconds(done.full_s.median)}" if done.full_s else ""
    table = text_table(
        ("", *(speed.storage for speed in done.storages)),
        title=f"{done.context_tokens:,} tokens of {done.model}, {done.dtype}{full}",
        caption=f"medians of {done.rounds} rounds (smallest – largest){_catalog_line(done)}",
    )
    table.columns[0].no_wrap = True
    table.add_row("size", *(amount(speed.bytes) for speed in done.storages))
    for label, name, unit in (
        ("cold, plain read", "plain_cold_s", "ms"),
        ("cold, load and verify", "cold_s", "ms"),
        ("  until first layers", "first_layer_s", "ms"),
        ("warm, plain read", "plain_warm_s", "ms"),
        ("warm, load and verify", "warm_s", "ms"),
        ("place in a prompt", "place_s", "ms"),
        ("cold throughput, of plain", "cold_throughput", ""),
        ("warm time, of plain", "warm_slowdown", ""),
        ("cold + place, of prefill", "of_prefill", "%"),
    ):
        values = [getattr(speed, name) for speed in done.storages]
        table.add_row(label, *("–" if value is None else _range_text(value, unit) for value in values))
    return table


def _catalog_line(done: "StoreBench") -> str:
    """Return a line about the catalogue, if it was measured."""
    catalog = done.catalog
    if catalog is None:
        return ""
    times = "{:.2f} ms ({:.2f} – {:.2f})".format(
        *(1e3 * value for value in (catalog.look_up_s.median, catalog.look_up_s.low, catalog.look_up_s.high))
    )
    counts = f"{catalog.spans} entries among {catalog.entries:,}"
    return f"\none look-up of {counts}: {times}, median of {catalog.look_ups:,}"


def _range_text(value: "MedianRange", unit: str) -> str:
    scale, form = {"ms": (1e3, ".1f"), "%": (1e2, ".2f"), "": (1.0, ".2f")}[unit]
    median, low, high = (format(number * scale, form) for number in (value.median, value.low, value.high))
    return f"{median} {unit} ({low} – {high})".replace("  ", " ")


LENGTHS = (1024, 2048, 4096, 8192, 16384)
BUDGETS = (0.05, 0.1, 0.2, 1024.0)


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The options of `bench decode`: the texts, and the strategies that decode them."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="A strategy, or dynakv/ABLATION, in addition to dense; repeatable. Default: all that use the disk.",
        ),
    ] = None
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", min=1, help="Text length to decode at, in tokens; repeatable. Default: 1K to 16K."
        ),
    ] = None
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="As --kv-budget; repeatable. Default: 5, 10 and 20 %, and 1024."),
    ] = None
    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: exact.")
    ] = None
    resident_bytes: Annotated[
        str | None,
        typer.Option(
            "--resident-bytes", help="Limit of KV in memory. Default: 30 % of all KV at each length."
        ),
    ] = None
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens timed at each length.")] = 64
    no_dense: Annotated[
        bool, typer.Option("--no-dense", help="Skip dense decoding, which needs memory for all KV.")
    ] = False
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Read through the system's page cache instead of directly.")
    ] = False
    folder: bench.Folder = None

    def settings(self) -> "list[tuple[str, OffloadSettings]]":
        """Return every strategy with its settings, for each storage and budget; raises InvalidRequest."""
        from kvweave.decode.settings import DiskSettings, OffloadSettings
        from kvweave_lab.eval.decoding.measure import variant_named
        from kvweave_lab.strategies import STRATEGIES

        limit = None if self.resident_bytes is None else opt.size_bytes(self.resident_bytes)
        storages = bench.storages_named(self.storage or ["exact"])
        names = [name for name in self.strategy or STRATEGIES if name != "dense"]
        disk = DiskSettings(direct=not self.page_cache)
        return [
            (name, variant_named(name, OffloadSettings(budget, limit, storage=storage, disk=disk)))
            for storage in storages
            for budget in self.budget or BUDGETS
            for name in names
        ]


@keeps_nothing
@opt.with_options()
def decode(
    *, model: bench.CpuModel, options: DecodeOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """What a decoded token reads and how long it takes, by strategy, length and budget, compared with dense decoding."""
    from kvweave.cli.output import progress_bar
    from kvweave_lab.bench.decode import bench_decode

    opt.quiet_libraries()
    settings = options.settings()
    adapter, _ = model.load()
    with bench.temporary_folder(options.folder) as place, progress_bar(quiet or json) as report:
        rows = bench_decode(
            adapter,
            place,
            settings,
            options.length or LENGTHS,
            steps=options.steps,
            dense=not options.no_dense,
            progress=report,
        )
    _show_decode(adapter, rows, json=json)


def _show_decode(adapter: "Adapter", rows: "Sequence[DecodeCost]", *, json: bool) -> None:
    from kvweave.cli.output import STDOUT, print_json
    from kvweave_lab.bench.measurement import memory_limit_bytes

    memory_limit = memory_limit_bytes()
    if json:
        about = {
            "model": adapter.fingerprint.name,
            "dtype": str(adapter.geometry.dtype),
            "memory_limit_bytes": memory_limit,  # of the process and its page cache; None where the system sets none
        }
        print_json({**about, "rows": [_decode_json(row) for row in rows], **bench.environment()})
        return
    STDOUT.print(_decode_table(adapter.fingerprint.name, rows, memory_limit))


def _decode_json(row: "DecodeCost") -> dict[str, Any]:
    """Return a row as JSON values, with the counts per token as keys of the row."""
    from kvweave.results import facts

    flat: dict[str, Any] = facts(row)
    decoding = flat.pop("decoding")
    return flat | (decoding if isinstance(decoding, dict) else {})


def _decode_table(model: str, rows: "Sequence[DecodeCost]", limit_bytes: int | None) -> "Table":
    from kvweave.cli.output import amount, seconds, share
    from kvweave_lab.report import text_table

    columns = "length|strategy|budget|storage|per token|of dense|reads|pages|read|run|hits|memory".split("|")
    table = text_table(columns, names=0, title=model)
    if limit_bytes is not None:
        table.caption = f"under a memory limit of {amount(limit_bytes)}, page cache included"
    for name in ("strategy", "storage"):
        table.columns[columns.index(name)].justify = "left"
    for row in rows:
        counts = row.decoding
        cells = [f"{row.decode_tokens:,}", row.strategy]
        budget = "" if row.budget is None else share(row.budget) if row.budget <= 1 else f"{row.budget:,.0f}"
        cells += [budget, row.storage, seconds(row.latency_s_per_token.median)]
        cells.append("" if row.of_dense is None else f"{row.of_dense.median:.2f}")
        if counts is None:
            cells += ["", "", "", "", "", amount(row.dense_kv_bytes)]
        else:
            cells += [f"{counts.reads_per_token:,.0f}", f"{counts.pages_read_per_token:,.0f}"]
            cells += [amount(counts.bytes_per_token), f"{counts.mean_run_entries:.0f}"]
            cells += [share(counts.hit_rate), amount(counts.resident_bytes)]
        table.add_row(*cells)
    return table
