"""bench decode: what a token costs with the KV on flash."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.decode.settings import OffloadSettings
    from kvweave.types import Storage
    from kvweave_lab.bench.decode import DecodeCost

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
            help="A strategy, or dynakv/ABLATION, beside dense; repeatable. Default: all that use flash.",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", min=1, help="Tokens decoded at; repeatable. Default: 1K to 16K."),
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
            "--resident-bytes", help="Bound of KV in memory. Default: 30 % of all KV at each length."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens timed at each length.")] = 64,
    no_dense: Annotated[
        bool, typer.Option("--no-dense", help="Leave out dense decoding, which needs memory for all KV.")
    ] = False,
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Let the system keep pages in memory: no direct reads.")
    ] = False,
    folder: bench.Folder = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """What a decoded token reads and how long it takes, by strategy, length and budget, beside dense decoding."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.engine.facts import facts
    from kvweave_lab.bench.circumstances import circumstances
    from kvweave_lab.bench.decode import bench_decode
    from kvweave_lab.bench.memory_limit import memory_limit_bytes

    opt.quiet_libraries()
    bound = None if resident_bytes is None else opt.size_bytes(resident_bytes)
    storages = opt.storages_named(storage or ["exact"])
    chosen = _settings(strategy, budget or BUDGETS, storages, bound, direct=not page_cache)
    adapter, _ = bench.measured_model(shape, model, dtype, "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="kvweave-bench-", dir=folder) as place,
        progress_bar(quiet or json) as report,
    ):
        rows = bench_decode(
            adapter,
            Path(place),
            chosen,
            length or LENGTHS,
            steps=steps,
            dense=not no_dense,
            progress=report,
        )
    limit = memory_limit_bytes()
    if json:
        about = {
            "model": adapter.fingerprint.name,
            "dtype": str(adapter.geometry.dtype),
            "memory_limit_bytes": limit,  # of the system, for the process and its page cache; None where it sets none
        }
        said = [_flat(row) for row in rows]
        print_json({**about, "rows": said, **facts(circumstances(bench.this_command()))})
        return
    STDOUT.print(_table(adapter.fingerprint.name, rows, limit))


def _settings(
    strategies: Sequence[str] | None,
    budgets: Sequence[float],
    storages: "Sequence[Storage]",
    resident_bytes: int | None,
    *,
    direct: bool,
) -> "list[tuple[str, OffloadSettings]]":
    from kvweave.decode.settings import DiskSettings, OffloadSettings
    from kvweave.decode.strategies import STRATEGIES
    from kvweave_lab.eval.decoding.ablations import variant_named

    names = [name for name in strategies or STRATEGIES if name != "dense"]
    flash = DiskSettings(direct=direct)
    return [
        (name, variant_named(name, OffloadSettings(budget, resident_bytes, storage=storage, flash=flash)))
        for storage in storages
        for budget in budgets
        for name in names
    ]


def _flat(row: "DecodeCost") -> dict[str, object]:
    """A row as reports have it: the names of what was read beside those of what was asked."""
    from kvweave.engine.facts import facts

    told: dict[str, object] = facts(row)
    decoding = told.pop("decoding")
    return told | (decoding if isinstance(decoding, dict) else {})


def _table(model: str, rows: "Sequence[DecodeCost]", limit_bytes: int | None) -> "Table":
    from rich.table import Table

    from kvweave.cli.output import amount, seconds, share

    table = Table(box=None, header_style="bold", title=model, title_justify="left", caption_justify="left")
    if limit_bytes is not None:
        table.caption = f"under a memory limit of {amount(limit_bytes)}, page cache included"
    for name in (
        "length",
        "strategy",
        "budget",
        "storage",
        "per token",
        "of dense",
        "reads",
        "pages",
        "read",
        "run",
        "hits",
        "memory",
    ):
        table.add_column(name, justify="left" if name in ("strategy", "storage") else "right", no_wrap=True)
    for row in rows:
        told = row.decoding
        cells = [f"{row.decode_tokens:,}", row.strategy]
        budget = "" if row.budget is None else share(row.budget) if row.budget <= 1 else f"{row.budget:,.0f}"
        cells += [budget, row.storage, seconds(row.latency_s_per_token.median)]
        cells.append("" if row.of_dense is None else f"{row.of_dense.median:.2f}")
        if told is None:
            cells += ["", "", "", "", "", amount(row.dense_kv_bytes)]
        else:
            cells += [
                f"{told.reads_per_token:,.0f}",
                f"{told.pages_read_per_token:,.0f}",
                amount(told.bytes_per_token),
            ]
            cells += [f"{told.mean_run_entries:.0f}", share(told.hit_rate), amount(told.resident_bytes)]
        table.add_row(*cells)
    return table
