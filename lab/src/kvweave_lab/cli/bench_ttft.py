"""bench ttft: how much sooner the first token is there, beside full prefill and beside the limit."""

import json as jsons
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.ttft_results import TtftBench

CONTEXTS = (4096,)
RECIPES = ("prophetkv",)
RATIOS = (0.0, 0.1, 0.15, 0.2, 0.3, 1.0)
FEW_ROUNDS = 5


@keeps_nothing
def ttft(
    shape: bench.Shape = None,
    model: bench.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    context_tokens: Annotated[
        list[int] | None,
        typer.Option("--context-tokens", min=1, help="Tokens of all chunks; repeatable. Default: 4096."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of one chunk.")] = 512,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "--select", help="Repeatable. Default: prophetkv.")
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", min=0, max=1, help="Share of stale context to recompute; repeatable. Default: 0 to 1."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often everything is timed, in turn.")
    ] = FEW_ROUNDS,
    kv_from: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-from", help="Where requests find stored KV: memory or disk; repeatable. Default: memory."
        ),
    ] = None,
    folder: bench.Folder = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for ttft.json and ttft.png.")
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Time to first token by context, recipe and ratio, beside full prefill and the least it could take."""
    from kvweave.cli.output import STDERR, STDOUT, print_json, progress_bar
    from kvweave_lab.bench.ttft import bench_ttft
    from kvweave_lab.bench.ttft_results import WHENCE, TtftSettings

    opt.quiet_libraries()
    settings = TtftSettings(
        context_tokens=tuple(context_tokens or CONTEXTS),
        recipes=tuple(recipe or RECIPES),
        ratios=tuple(ratio if ratio is not None else RATIOS),
        chunk_tokens=chunk_tokens,
        rounds=rounds,
        kv_from=tuple(dict.fromkeys(opt.chosen(kv_from or ["memory"], WHENCE, "place of KV"))),
    )
    adapter, name = bench.measured_model(shape, model, dtype, device or "auto")
    with (
        tempfile.TemporaryDirectory(prefix="kvweave-bench-", dir=folder) as place,
        progress_bar(quiet or json) as report,
    ):
        done = bench_ttft(adapter, name, Path(place), settings, report)
    if rounds < FEW_ROUNDS:
        STDERR.print(
            f"fewer than {FEW_ROUNDS} rounds are a first look; report medians of {FEW_ROUNDS} or more"
        )
    content = _content(done)
    files = _write(output, done, content) if output else []
    if json:
        print_json(content)
        return
    for table in _tables(done):
        STDOUT.print(table)
    for file in files:
        STDOUT.print(f"[dim]{file}[/]", soft_wrap=True)


def _content(done: "TtftBench") -> dict[str, Any]:
    """The measurement with its circumstances, as dictionaries."""
    from kvweave.engine.facts import facts
    from kvweave_lab.bench.circumstances import circumstances

    return {**facts(done), **facts(circumstances(bench.this_command()))}


def _write(folder: Path, done: "TtftBench", content: dict[str, Any]) -> list[Path]:
    from kvweave_lab.bench.ttft_plot import ttft_plot

    folder.mkdir(parents=True, exist_ok=True)
    numbers, plot = folder / "ttft.json", folder / "ttft.png"
    numbers.write_text(jsons.dumps(content, indent=2) + "\n", encoding="utf-8")
    plot.write_bytes(ttft_plot(done))
    return [numbers, plot]


def _tables(done: "TtftBench") -> "list[Table]":
    """How fast, and where the time goes: two tables, so that each fits a terminal."""
    from rich.table import Table

    from kvweave.cli.output import amount, seconds

    first = done.rows[0]
    fast = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")  # nine columns in 80
    fast.title_justify = fast.caption_justify = "left"
    fast.title = f"{first.shape}, {first.dtype}, {first.device}, {first.threads} threads"
    fast.caption = _circumstances(done)
    parts = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    both = len(done.settings.kv_from) > 1
    named = ("context", "recipe", "ratio", *(["KV from"] if both else []))
    for name in (*named, "rows", "ttft", "speedup", "range", "limit", "efficiency"):
        fast.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for name in (*named, "load", "place", "select", "recompute", "peak"):
        parts.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=True)
    for row, spread in zip(done.rows, done.spreads, strict=True):
        case = (f"{row.context_tokens:,}", row.recipe, f"{row.ratio:g}", *([row.kv_from] if both else []))
        fast.add_row(
            *case,
            f"{row.rows:,}",
            seconds(row.ttft_s),
            f"{row.speedup:.2f}×",
            f"{spread.speedup.low:.2f} – {spread.speedup.high:.2f}",
            f"{row.limit_speedup:.2f}×",
            f"{row.efficiency:.2f}",
        )
        parts.add_row(
            *case,
            *(seconds(value) for value in (row.load_s, row.place_s, row.select_s, row.recompute_s)),
            "" if row.peak_bytes is None else amount(row.peak_bytes),
        )
    return [fast, parts]


def _circumstances(done: "TtftBench") -> str:
    """What the rows are compared with, and how they were taken."""
    from kvweave.cli.output import seconds

    full = [
        f"full prefill of {one.prompt_tokens:,} tokens: {seconds(one.ways_s[one.fastest].median)} "
        f"({one.fastest}, {one.gflops_per_s:,.0f} GFLOP/s)"
        for one in done.full
    ]
    found = " or ".join(done.settings.kv_from)
    return "\n".join([*full, f"medians and range of {done.settings.rounds} rounds; stored KV from {found}"])
