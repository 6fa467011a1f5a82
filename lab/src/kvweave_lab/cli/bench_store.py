"""bench: the commands that measure stored KV: store, decode and reuse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.decode.settings import OffloadSettings
    from kvweave.types import Storage
    from kvweave_lab.bench.decode import DecodeCost
    from kvweave_lab.bench.measurement import MedianRange
    from kvweave_lab.bench.reuse import ReuseCounts, ReusePoint
    from kvweave_lab.bench.store import StoreBench
    from kvweave_lab.bench.workload import Traffic


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
        int, typer.Option("--full-rounds", min=0, help="Rounds that also time full prefill.")
    ] = 3,
    catalog_entries: Annotated[
        int,
        typer.Option(
            "--catalog-entries",
            min=0,
            help="Entries of the catalogue that look-ups are timed in; 0 skips it.",
        ),
    ] = 100_000,
    folder: bench.Folder = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """How fast stored chunk KV is loaded, compared with plain reads of the same bytes and with computing it."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.engine.facts import facts
    from kvweave.types import STORAGES
    from kvweave_lab.bench.store import bench_store

    opt.quiet_libraries()
    storages = opt.storages_named(storage or list(STORAGES))
    adapter, _ = bench.measured_model(shape, model, dtype, "cpu")
    with bench.temporary_folder(folder) as place, progress_bar(quiet or json) as report:
        done = bench_store(
            adapter,
            place,
            storages,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            rounds=rounds,
            full_rounds=full_rounds,
            catalog_entries=catalog_entries,
            progress=report,
        )
    if json:
        print_json({**facts(done), **bench.environment()})
        return
    STDOUT.print(_store_table(done))


def _store_table(done: "StoreBench") -> "Table":
    from kvweave.cli.output import amount, seconds
    from kvweave_lab.report.tables import text_table

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


@keeps_nothing
def decode(
    shape: bench.Shape = None,
    model: bench.Model = None,
    dtype: opt.Dtype = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="A strategy, or dynakv/ABLATION, in addition to dense; repeatable. Default: all that use flash.",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", min=1, help="Text length to decode at, in tokens; repeatable. Default: 1K to 16K."
        ),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="As --kv-budget; repeatable. Default: 5, 10 and 20 %, and 1024."),
    ] = None,
    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: exact.")
    ] = None,
    resident_bytes: Annotated[
        str | None,
        typer.Option(
            "--resident-bytes", help="Limit of KV in memory. Default: 30 % of all KV at each length."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens timed at each length.")] = 64,
    no_dense: Annotated[
        bool, typer.Option("--no-dense", help="Skip dense decoding, which needs memory for all KV.")
    ] = False,
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Read through the system's page cache instead of directly.")
    ] = False,
    folder: bench.Folder = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """What a decoded token reads and how long it takes, by strategy, length and budget, compared with dense decoding."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.bench.decode import bench_decode
    from kvweave_lab.bench.environment import memory_limit_bytes

    opt.quiet_libraries()
    limit = None if resident_bytes is None else opt.size_bytes(resident_bytes)
    storages = opt.storages_named(storage or ["exact"])
    settings = _decode_settings(strategy, budget or BUDGETS, storages, limit, direct=not page_cache)
    adapter, _ = bench.measured_model(shape, model, dtype, "cpu")
    with bench.temporary_folder(folder) as place, progress_bar(quiet or json) as report:
        rows = bench_decode(
            adapter, place, settings, length or LENGTHS, steps=steps, dense=not no_dense, progress=report
        )
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


def _decode_settings(
    strategies: Sequence[str] | None,
    budgets: Sequence[float],
    storages: "Sequence[Storage]",
    resident_bytes: int | None,
    *,
    direct: bool,
) -> "list[tuple[str, OffloadSettings]]":
    from kvweave.decode.settings import DiskSettings, OffloadSettings
    from kvweave.decode.strategies import STRATEGIES
    from kvweave_lab.eval.decoding.variants import variant_named

    names = [name for name in strategies or STRATEGIES if name != "dense"]
    disk = DiskSettings(direct=direct)
    return [
        (name, variant_named(name, OffloadSettings(budget, resident_bytes, storage=storage, disk=disk)))
        for storage in storages
        for budget in budgets
        for name in names
    ]


def _decode_json(row: "DecodeCost") -> dict[str, Any]:
    """Return a row as JSON values, with the counts per token as keys of the row."""
    from kvweave.engine.facts import facts

    flat: dict[str, Any] = facts(row)
    decoding = flat.pop("decoding")
    return flat | (decoding if isinstance(decoding, dict) else {})


def _decode_table(model: str, rows: "Sequence[DecodeCost]", limit_bytes: int | None) -> "Table":
    from kvweave.cli.output import amount, seconds, share
    from kvweave_lab.report.tables import text_table

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


@keeps_nothing
def reuse(
    queries: Annotated[int, typer.Option("--queries", min=1, help="Number of questions.")] = 1000,
    known_share: Annotated[
        float,
        typer.Option("--known-share", help="Share of retrieved chunks that come from preloaded documents."),
    ] = 0.6,
    shared_share: Annotated[
        float,
        typer.Option(
            "--shared-share", help="Share of retrieved chunks from documents that are added later and shared."
        ),
    ] = 0.3,
    known_chunks: Annotated[
        int, typer.Option("--known-chunks", help="Chunks of preloaded documents.")
    ] = 1000,
    shared_chunks: Annotated[
        int, typer.Option("--shared-chunks", help="Chunks of documents that are added later and shared.")
    ] = 500,
    chunks_per_query: Annotated[
        list[int] | None,
        typer.Option("--chunks-per-query", help="Chunks retrieved per question. Default: 5, and 10 and 20."),
    ] = None,
    exponent: Annotated[
        list[float] | None,
        typer.Option("--exponent", help="Exponent of chunk popularity. Default: 1, and 0.6 and 1.4."),
    ] = None,
    shuffled: Annotated[
        list[float] | None,
        typer.Option(
            "--shuffled", help="Share of questions with chunks in random order. Default: 1, and 0.5 and 0."
        ),
    ] = None,
    repeated: Annotated[
        list[float] | None,
        typer.Option(
            "--repeated", help="Share of questions that repeat an earlier one. Default: 0, and 0.3."
        ),
    ] = None,
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of stale tokens to recompute.")
    ] = 0.15,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the questions.")] = 0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Storage, hits and repeated work of prefix caches and of chunk KV, counted over drawn questions.

    Repeatable options vary one at a time; the first value of each is used while the others vary.
    """
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.bench.reuse import bench_reuse, sweep
    from kvweave_lab.bench.workload import Traffic

    opt.quiet_libraries()
    numbers, exponents = chunks_per_query or [5, 10, 20], exponent or [1.0, 0.6, 1.4]
    orders, repeats = shuffled or [1.0, 0.5, 0.0], repeated or [0.0, 0.3]
    base = Traffic(
        queries=queries,
        chunks_per_query=numbers[0],
        known_share=known_share,
        shared_share=shared_share,
        known_chunks=known_chunks,
        shared_chunks=shared_chunks,
        exponent=exponents[0],
        shuffled=orders[0],
        repeated=repeats[0],
        seed=seed,
    )
    points = sweep(base, chunks_per_query=numbers, exponents=exponents, shuffled=orders, repeated=repeats)
    with progress_bar(quiet or json) as report:
        done = bench_reuse(points, report)
    if json:
        print_json(
            {"ratio": ratio, "points": [_reuse_json(point, ratio) for point in done], **bench.environment()}
        )
        return
    STDOUT.print(_reuse_table(done, ratio))


def _reuse_json(point: "ReusePoint", ratio: float) -> dict[str, Any]:
    from kvweave.engine.facts import facts

    caches = [
        {
            **facts(one),
            "hit_rate": one.hit_rate,
            "exact_share": one.exact_share,
            "storage_of_prefix": point.storage(one),
            "avoided": point.avoided(one),
            "answering_share": one.answering_share(ratio),
        }
        for one in point.caches
    ]
    return {"traffic": facts(point.traffic), "cap": point.cap, "caches": caches}


def _reuse_table(points: "list[ReusePoint]", ratio: float) -> "Table":
    from kvweave_lab.report.tables import text_table

    base = points[0].traffic
    table = text_table(
        ("", "stored", "of prefix", "found", "exact", "again", "avoided", "answering"),
        title=f"{base.queries:,} questions for {', '.join(_traffic_texts(base))}\n"
        f"chunks: {base.known_share:.0%} of {base.known_chunks:,} known, {base.shared_share:.0%} of "
        f"{base.shared_chunks:,} new and shared, the rest unique",
        caption="stored: chunks. found, exact, answering: share of retrieved chunks; avoided: share of what prefix"
        f" computes again.\nanswering: computed while answering, with {ratio:.0%} of what is stale",
    )
    table.columns[0].no_wrap = True
    for point in points:
        table.add_row(f"[bold]{_point_label(point, base)}[/bold]")
        for one in point.caches:
            table.add_row(f"  {one.cache}", *_reuse_cells(point, one, ratio))
    return table


def _traffic_texts(traffic: "Traffic") -> list[str]:
    """Return the values that a sweep changes, as texts."""
    return [
        f"{traffic.chunks_per_query} chunks each",
        f"exponent {traffic.exponent:g}",
        f"{traffic.shuffled:.0%} shuffled",
        f"{traffic.repeated:.0%} repeated",
    ]


def _point_label(point: "ReusePoint", base: "Traffic") -> str:
    """Return how a point differs from the base."""
    if point.cap is not None:
        return f"at most {point.cap:,} chunks"
    usual = _traffic_texts(base)
    return ", ".join(text for text in _traffic_texts(point.traffic) if text not in usual) or "as above"


def _reuse_cells(point: "ReusePoint", one: "ReuseCounts", ratio: float) -> list[str]:
    avoided = point.avoided(one)
    return [
        f"{one.stored:,}",
        f"{point.storage(one):.0%}",
        f"{one.hit_rate:.1%}",
        f"{one.exact_share:.1%}",
        f"{one.again:,}",
        "–" if avoided is None else f"{avoided:.1%}",
        f"{one.answering_share(ratio):.1%}",
    ]
