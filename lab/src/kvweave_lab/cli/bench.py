"""bench: the command group, and the commands that measure requests: ttft and steady."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench
from kvweave_lab.cli import (
    bench_reuse,
    bench_serve,
    bench_soak,
    bench_start,
    bench_store,
    bench_weights,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.steady import SteadyBench, SteadySettings
    from kvweave_lab.bench.ttft import TtftBench, TtftSettings

app = typer.Typer(
    help="Measure speed on this machine, always relative to a baseline.",
    short_help="Measure speed on this machine.",
    no_args_is_help=True,
)


@app.callback()
def _bench() -> None:
    """Measure speed on this machine, always relative to a baseline."""


CONTEXTS = (4096,)
RECIPES = ("prophetkv",)
RATIOS = (0.0, 0.1, 0.15, 0.2, 0.3, 1.0)
FEW_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """The options of `bench ttft`: contexts, recipes and ratios, and the folder for results."""

    context_tokens: Annotated[
        list[int] | None,
        typer.Option("--context-tokens", min=1, help="Tokens of all chunks; repeatable. Default: 4096."),
    ] = None
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens per chunk.")] = 512
    recipe: Annotated[list[str] | None, typer.Option("--recipe", help="Repeatable. Default: prophetkv.")] = (
        None
    )
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", min=0, max=1, help="Share of stale context to recompute; repeatable. Default: 0 to 1."
        ),
    ] = None
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds in which everything is timed in turn.")
    ] = FEW_ROUNDS
    kv_from: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-from", help="Where requests read stored KV: memory or disk; repeatable. Default: memory."
        ),
    ] = None
    folder: bench.Folder = None
    output: Annotated[Path | None, typer.Option("--output", help="Folder for ttft.json and ttft.png.")] = None

    def settings(self) -> "TtftSettings":
        """Return the settings of the measurement; raises InvalidRequest for an unknown place of KV."""
        from kvweave_lab.bench.ttft import KV_SOURCES, TtftSettings

        return TtftSettings(
            context_tokens=tuple(self.context_tokens or CONTEXTS),
            recipes=tuple(self.recipe or RECIPES),
            ratios=tuple(self.ratio if self.ratio is not None else RATIOS),
            chunk_tokens=self.chunk_tokens,
            rounds=self.rounds,
            kv_from=tuple(dict.fromkeys(bench.chosen(self.kv_from or ["memory"], KV_SOURCES, "place of KV"))),
        )


@keeps_nothing
@opt.with_options()
def ttft(
    *, model: bench.DeviceModel, options: TtftOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Time to first token by context, recipe and ratio, compared with full prefill and with the least possible time."""
    from kvweave.cli.output import STDERR, progress_bar
    from kvweave_lab.bench.ttft import bench_ttft

    opt.quiet_libraries()
    settings = options.settings()
    adapter, name = model.load(model.device or "auto")
    with bench.temporary_folder(options.folder) as place, progress_bar(quiet or json) as report:
        done = bench_ttft(adapter, name, place, settings, report)
    if options.rounds < FEW_ROUNDS:
        STDERR.print(
            f"fewer than {FEW_ROUNDS} rounds are a first look; report medians of {FEW_ROUNDS} or more"
        )
    _show_ttft(done, options.output, json=json)


def _show_ttft(done: "TtftBench", output: Path | None, *, json: bool) -> None:
    """Write the measurement to the output folder, if there is one, and print it."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave.results import facts

    content = {**facts(done), **bench.environment()}
    files: list[Path] = []
    if output:
        from kvweave_lab.bench.plots import ttft_plot

        files = bench.write_measurement(output, "ttft", content, ttft_plot(done))
    if json:
        print_json(content)
        return
    for table in _ttft_tables(done):
        STDOUT.print(table)
    bench.print_paths(files)


def _ttft_tables(done: "TtftBench") -> "list[Table]":
    """Return how fast requests are, and where their time goes: two tables, so that each fits a terminal."""
    from kvweave.cli.output import amount, seconds
    from kvweave_lab.report import text_table

    first = done.rows[0]
    several = len(done.settings.kv_from) > 1
    case_columns = ("context", "recipe", "ratio", *(["KV from"] if several else []))
    speed = text_table(
        (*case_columns, "rows", "ttft", "speedup", "range", "limit", "efficiency"),
        names=0,
        title=f"{first.shape}, {first.dtype}, {first.device}, {first.threads} threads",
        caption=_ttft_conditions(done),
    )
    parts = text_table((*case_columns, "load", "place", "select", "recompute", "peak"), names=0)
    for table in (speed, parts):
        table.columns[1].justify = "left"
    for row, ranges in zip(done.rows, done.spreads, strict=True):
        case = (f"{row.context_tokens:,}", row.recipe, f"{row.ratio:g}", *([row.kv_from] if several else []))
        speed.add_row(
            *case,
            f"{row.rows:,}",
            seconds(row.ttft_s),
            f"{row.speedup:.2f}×",
            f"{ranges.speedup.low:.2f} – {ranges.speedup.high:.2f}",
            f"{row.limit_speedup:.2f}×",
            f"{row.efficiency:.2f}",
        )
        parts.add_row(
            *case,
            *(seconds(value) for value in (row.load_s, row.place_s, row.select_s, row.recompute_s)),
            "" if row.peak_bytes is None else amount(row.peak_bytes),
        )
    return [speed, parts]


def _ttft_conditions(done: "TtftBench") -> str:
    """Return the baseline of the rows, and how they were measured."""
    from kvweave.cli.output import seconds

    full = [
        f"full prefill of {one.prompt_tokens:,} tokens: {seconds(one.ways_s[one.fastest].median)} "
        f"({one.fastest}, {one.gflops_per_s:,.0f} GFLOP/s)"
        for one in done.full
    ]
    sources = " or ".join(done.settings.kv_from)
    return "\n".join([*full, f"medians and range of {done.settings.rounds} rounds; stored KV from {sources}"])


@dataclass(frozen=True, slots=True)
class SteadyOptions:
    """The options of `bench steady`: the questions, the recipe, and the folder for results."""

    queries: Annotated[int, typer.Option("--queries", min=4, help="Number of questions.")] = 300
    chunks_per_query: Annotated[
        int, typer.Option("--chunks-per-query", min=1, help="Chunks retrieved per question.")
    ] = 8
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens per chunk.")] = 512
    known_chunks: Annotated[
        int, typer.Option("--known-chunks", min=1, help="Chunks of preloaded documents.")
    ] = 1000
    shared_chunks: Annotated[
        int,
        typer.Option("--shared-chunks", min=1, help="Chunks of documents that are added later and shared."),
    ] = 500
    exponent: Annotated[float, typer.Option("--exponent", min=0, help="Exponent of chunk popularity.")] = 1.0
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe that reuses chunk KV.")] = "prophetkv"
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of stale context to recompute.")
    ] = 0.15
    host_limit: Annotated[
        str, typer.Option("--host-limit", help="Limit of KV copies in the process's memory: 500MB, 2GB.")
    ] = "2GB"
    page_cache: Annotated[
        bool,
        typer.Option(
            "--page-cache",
            help="Leave files in the page cache, for runs under a memory limit that includes it. Otherwise, all KV "
            "outside the host tier is read from disk.",
        ),
    ] = False
    full_every: Annotated[
        int, typer.Option("--full-every", min=1, help="Time full prefill every N questions.")
    ] = 10
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the questions.")] = 0
    folder: bench.Folder = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Folder for steady.json and steady.png. The same command resumes an interrupted run there; until it is "
            "done, the folder also holds the chunk KV.",
        ),
    ] = None

    def settings(self) -> "SteadySettings":
        """Return the settings of the measurement; raises InvalidRequest for impossible ones."""
        from kvweave_lab.bench.steady import SteadySettings
        from kvweave_lab.bench.workload import Traffic

        traffic = Traffic(
            queries=self.queries,
            chunks_per_query=self.chunks_per_query,
            known_chunks=self.known_chunks,
            shared_chunks=self.shared_chunks,
            exponent=self.exponent,
            seed=self.seed,
        )
        return SteadySettings(
            traffic,
            self.recipe,
            self.ratio,
            self.chunk_tokens,
            opt.size_bytes(self.host_limit),
            self.full_every,
            self.page_cache,
        )


@bench.keeps_output
@opt.with_options()
def steady(
    *, model: bench.DeviceModel, options: SteadyOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Speed-up over full prefill, question by question, over a growing store that does not fit into memory.

    No question is repeated, so a speed-up that depends on warm caches decays here.
    """
    from kvweave.cli.output import progress_bar
    from kvweave_lab.bench.steady import bench_steady

    opt.quiet_libraries()
    settings, output = options.settings(), options.output
    adapter, name = model.load(model.device or "auto")
    with _store_folder(output, options.folder) as place, progress_bar(quiet or json) as report:
        done = bench_steady(adapter, name, place, settings, output, report)
    _warn_if_it_fits(done)
    _show_steady(done, output, json=json)


def _show_steady(done: "SteadyBench", output: Path | None, *, json: bool) -> None:
    """Write the measurement to the output folder, if there is one, and print it."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave.results import facts

    content = {**facts(done), **bench.environment()}
    files: list[Path] = []
    if output:
        from kvweave_lab.bench.plots import steady_plot

        files = bench.write_measurement(output, "steady", content, steady_plot(done))
    if json:
        print_json(content)
        return
    STDOUT.print(_steady_table(done))
    STDOUT.print(_steady_summary(done))
    bench.print_paths(files)


@contextmanager
def _store_folder(output: Path | None, folder: Path | None) -> Iterator[Path]:
    """Provide a folder for chunk KV: in the output folder until the run is done, otherwise a temporary one."""
    if output is None:
        with bench.temporary_folder(folder) as place:
            yield place
        return
    yield output / "store"
    shutil.rmtree(output / "store", ignore_errors=True)


def _warn_if_it_fits(done: "SteadyBench") -> None:
    """Warn if the whole store fits into memory, since the results are then not representative."""
    from kvweave.cli.output import STDERR, amount

    stored = done.rows[-1].stored_bytes
    if stored <= done.settings.host_bytes:
        STDERR.print(f"all {amount(stored)} fit into memory; give a smaller --host-limit or more chunks")
    elif done.settings.page_cache and stored <= (done.memory_limit_bytes or stored):
        STDERR.print(
            f"no memory limit below the {amount(stored)} that are stored: the page cache may hold them all; run this under "
            "one, for example `systemd-run --user --scope -p MemoryMax=4G kvweave bench steady …`"
        )


def _steady_table(done: "SteadyBench") -> "Table":
    """Return a row for each quarter of the questions."""
    import statistics

    from kvweave.cli.output import amount, seconds
    from kvweave_lab.report import text_table

    asked, count = done.settings, len(done.rows)
    table = text_table(
        ("questions", "speedup", "ttft", "place", "from memory", "stored"),
        names=0,
        title=f"{done.shape}, {done.dtype}, {done.device}: {count:,} questions, {asked.recipe} at {asked.ratio:g}",
    )
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


def _steady_summary(done: "SteadyBench") -> str:
    """Return the decay of the speed-up, and the conditions."""
    from kvweave.cli.output import amount

    asked = done.settings
    reads = "" if asked.page_cache else ", files outside the page cache"
    return (
        f"medians; the last quarter's speed-up is {done.kept:.2f} of the second's\n"
        f"{amount(done.rows[-1].stored_bytes)} stored, at most {amount(asked.host_bytes)} in memory{reads}"
    )


app.command("ttft", short_help="Time to first token, compared with full prefill.")(ttft)
app.command("start", short_help="Processor time until commands are ready.")(bench_start.start)
app.command("steady", short_help="Check that the speed-up lasts over many questions.")(steady)
app.command("store", short_help="How fast stored chunk KV is loaded.")(bench_store.store)
app.command("decode", short_help="Reads and time of a token decoded from disk.")(bench_store.decode)
app.command("reuse", short_help="Count hits of prefix caches and of chunk KV.")(bench_reuse.reuse)
app.command("weights", short_help="Speed and quality of 8- and 4-bit weights.")(bench_weights.weights)
app.command("serve", short_help="Throughput and latency of servers under load.")(bench_serve.serve)
app.command("soak", short_help="Load and kill a server; check that nothing is lost.")(bench_soak.soak)
