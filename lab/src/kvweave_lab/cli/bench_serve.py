"""bench: the command that measures servers over HTTP."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.serving.comparison import ServeBench, ServeSettings
    from kvweave_lab.bench.serving.first_token import FirstToken
    from kvweave_lab.bench.serving.shared_memory import SharedMemory
    from kvweave_lab.bench.serving.summary import LongestGaps, Percentiles

FEW_REQUESTS = 100
COLUMNS = (
    *("rate", "system", "answered", "refused", "failed", "req/s", "tok/s"),
    *(
        "TTFT p50",
        "p95",
        "p99",
        "TPOT p50",
        "p95",
        "p99",
        "longest gap p50",
        "p95",
        "max",
        "cached",
        "memory",
    ),
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Which servers are measured, with what requests, and where results are written."""

    model: Annotated[
        str | None, typer.Option("--model", help="The model to serve. Default: the shipped reference model.")
    ] = None
    gguf: Annotated[
        Path | None,
        typer.Option(
            "--gguf",
            help="GGUF file of the same model for llama-server. Without it, llama-server is left out.",
        ),
    ] = None
    system: Annotated[
        list[str] | None,
        typer.Option(
            "--system",
            help="default, no-async, no-share, llama-server, or a recipe; repeatable. Default: default, full, prefix, "
            "no-async, no-share, and llama-server with --gguf.",
        ),
    ] = None
    rate: Annotated[
        list[str] | None,
        typer.Option(
            "--rate",
            help="Arrivals per second, or SYSTEM=RATE for that system alone; repeatable. Default: five, from what the systems can "
            "serve.",
        ),
    ] = None
    requests: Annotated[
        int,
        typer.Option(
            "--requests",
            min=0,
            help="Number of requests for each system, rate and round; 0 leaves this part out.",
        ),
    ] = 100
    warm_requests: Annotated[
        int,
        typer.Option(
            "--warm-requests", min=0, help="Number of warm-up requests, after a pass over all documents."
        ),
    ] = 16
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds in which each rate is measured in turn.")
    ] = 1
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents of the corpus.")] = 200
    per_request: Annotated[int, typer.Option("--per-request", min=1, help="Documents of a request.")] = 8
    document_tokens: Annotated[
        int, typer.Option("--document-tokens", min=1, help="Tokens of a document.")
    ] = 512
    exponent: Annotated[float, typer.Option("--exponent", min=0, help="Exponent of popularity (Zipf).")] = 1.0
    shuffled: Annotated[
        float,
        typer.Option(
            "--shuffled",
            min=0,
            max=1,
            help="Share of requests with documents in random order; the others order them by popularity.",
        ),
    ] = 1.0
    repeated: Annotated[
        float,
        typer.Option(
            "--repeated", min=0, max=1, help="Share of requests with the documents of an earlier request."
        ),
    ] = 0.0
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 32
    ratio: Annotated[
        float | None, typer.Option("--ratio", min=0, max=1, help="Share to recompute. Default: the recipe's.")
    ] = None
    ttft_target: Annotated[
        list[float] | None,
        typer.Option(
            "--ttft-target",
            help="Seconds of p95 TTFT at which throughput is compared; repeatable. Default: those of prefix at each rate.",
        ),
    ] = None
    memory_requests: Annotated[
        int,
        typer.Option(
            "--memory-requests",
            min=0,
            help="Number of requests over the same documents whose memory is measured; 0 leaves this part out.",
        ),
    ] = 16
    latency_rounds: Annotated[
        int,
        typer.Option(
            "--latency-rounds",
            min=0,
            help="Number of first tokens timed through HTTP and in process; 0 leaves this part out.",
        ),
    ] = 20
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="Number of requests that llama-server computes at once.")
    ] = 4
    server_flag: Annotated[
        list[str] | None,
        typer.Option(
            "--server-flag", help="A flag for every `kvweave serve`, such as --queue=64; repeatable."
        ),
    ] = None
    disk_speed: Annotated[
        str | None,
        typer.Option(
            "--disk-speed",
            help="Bytes per second, such as 100MB, at which kvweave's servers read stored KV: a simulated disk, which every "
            "request reads its KV from. Default: as this machine has it, mostly in memory.",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of requests and arrivals.")] = 0
    folder: bench.Folder = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Folder for serve.json. The same command resumes an interrupted run there."
        ),
    ] = None

    def settings(self) -> "ServeSettings":
        """Return the settings of the measurement; raises InvalidRequest for impossible ones."""
        from kvweave_lab.bench.serving.comparison import ServeSettings
        from kvweave_lab.bench.serving.systems import SystemSettings, chosen_rates, chosen_systems
        from kvweave_lab.bench.serving.traffic import ServedTraffic

        traffic = ServedTraffic(
            documents=self.documents,
            per_request=self.per_request,
            document_tokens=self.document_tokens,
            exponent=self.exponent,
            shuffled=self.shuffled,
            repeated=self.repeated,
            new_tokens=self.new_tokens,
            seed=self.seed,
        )
        common = SystemSettings(
            model=self.model,
            gguf=self.gguf,
            context_tokens=self.per_request * self.document_tokens + self.new_tokens,
            new_tokens=self.new_tokens,
            ratio=self.ratio,
            flags=tuple(self.server_flag or ()),
            parallel=self.parallel,
            disk_bytes_per_s=None if self.disk_speed is None else opt.size_bytes(self.disk_speed),
        )
        systems = chosen_systems(self.system or (), common)
        rates, own_rates = chosen_rates(self.rate or (), systems)
        return ServeSettings(
            traffic,
            systems,
            common,
            rates=rates,
            own_rates=own_rates,
            requests=self.requests,
            warm_requests=self.warm_requests,
            rounds=self.rounds,
            ttft_targets_s=tuple(self.ttft_target or ()),
        )


@bench.keeps_output
@opt.with_options()
def serve(*, options: ServeOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Throughput and latency of servers under Poisson arrivals over documents of uneven popularity.

    Also: the memory of requests over the same documents, and what HTTP adds to the first token.
    """
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.report import json_bytes, write_files

    opt.quiet_libraries()
    settings, tables, content = options.settings(), [], {}
    with bench.temporary_folder(options.folder) as place, progress_bar(quiet or json) as report:
        for name, found, shown in _parts(options, settings, place, report):
            content[name] = found
            tables += shown
    content |= bench.environment()
    files = write_files(options.output, {"serve.json": json_bytes(content)}) if options.output else []
    if json:
        print_json(content)
        return
    for table in tables:
        STDOUT.print(table)
    bench.print_paths(files)


def _parts(options: ServeOptions, settings: "ServeSettings", place: Path, report: Any) -> Any:
    """Measure each part that is asked for; yield its name, its JSON and its tables."""
    from kvweave.results import facts

    if options.requests:
        from kvweave_lab.bench.serving.comparison import bench_serve

        done = bench_serve(settings, place, options.output, report)
        _warn(done)
        yield "throughput", facts(done), [_phases(done), _equal(done)]
    if options.memory_requests:
        from kvweave_lab.bench.serving.shared_memory import bench_shared_memory

        rows = bench_shared_memory(
            settings.common, settings.traffic, options.memory_requests, options.rounds, place, report
        )
        yield "memory", [facts(row) for row in rows], [_memory(rows)]
    if options.latency_rounds:
        from kvweave_lab.bench.serving.first_token import bench_first_token

        first = bench_first_token(settings.common, settings.traffic, options.latency_rounds, place, report)
        yield "first_token", facts(first), [_first_token(first)]


def _warn(done: "ServeBench") -> None:
    """Say on the error stream what makes figures unfit for quoting."""
    from kvweave.cli.output import STDERR
    from kvweave_lab.bench.serving.comparison import unequal_prompts

    if done.settings.requests < FEW_REQUESTS:
        STDERR.print(
            f"fewer than {FEW_REQUESTS} requests are a first look; their p95 and p99 rest on a few of them"
        )
    unequal = unequal_prompts(done)
    if unequal:
        STDERR.print(
            f"the prompts of {', '.join(unequal)} have another length: the systems do not do the same work"
        )
    for phase in done.phases:
        for failure in phase.failures:
            STDERR.print(f"{phase.system} failed at {phase.rate:g} requests/s: {failure}", markup=False)


def _phases(done: "ServeBench") -> "Table":
    from kvweave.cli.output import amount
    from kvweave_lab.report import text_table

    asked = done.settings.traffic
    table = text_table(
        COLUMNS,
        names=0,
        title=f"{done.model}: {asked.per_request} of {asked.documents} documents of {asked.document_tokens} tokens",
        caption=_conditions(done),
    )
    table.columns[1].justify = "left"
    for phase in done.phases:
        cached = phase.cached_tokens / max(1, phase.prompt_tokens)
        table.add_row(
            f"{phase.rate:g}",
            phase.system,
            *(f"{count:,}" for count in (phase.answered, phase.refused, phase.failed)),
            f"{phase.requests_per_s:.3f}",
            f"{phase.tokens_per_s:.1f}",
            *_seconds(phase.ttft),
            *_seconds(phase.tpot),
            *_gaps(phase.gap),
            f"{cached:.0%}",
            amount(phase.peak_bytes),
        )
    return table


def _conditions(done: "ServeBench") -> str:
    shares = [phase.prefix_share for phase in done.phases]
    prefixes = sum(shares) / max(1, len(shares))
    return (
        f"Poisson arrivals, {done.settings.requests} a rate and round; at most {done.settings.traffic.new_tokens} tokens, greedy\n"
        f"everything stored before; a prefix cache without limit would find {prefixes:.1%} of the documents"
    )


def _equal(done: "ServeBench") -> "Table":
    from kvweave_lab.report import text_table

    table = text_table(
        ("p95 TTFT", "system", "req/s", "of prefix"),
        names=0,
        title="throughput at equal p95 TTFT, interpolated between rates; a refused request counts as endless",
    )
    table.columns[1].justify = "left"
    for row in done.equal:
        served = "–" if row.requests_per_s is None else f"{row.requests_per_s:.3f}"
        ratio = "–" if row.of_baseline is None else f"{row.of_baseline:.2f}×"
        table.add_row(f"{row.ttft_s:.2f} s", row.system, f"{'≥ ' * row.at_least}{served}", ratio)
    return table


def _memory(rows: "list[SharedMemory]") -> "Table":
    from kvweave.cli.output import amount
    from kvweave_lab.report import text_table

    table = text_table(
        ("", "requests", "together", "one", "all", "of private"),
        title=f"memory of requests over the same documents, {rows[0].prompt_tokens:,} tokens each",
    )
    private = rows[-1].all_bytes
    for row in rows:
        table.add_row(
            row.system,
            f"{row.requests}",
            f"{row.together}",
            amount(round(row.one_bytes)),
            amount(round(row.all_bytes)),
            f"{row.all_bytes / private:.2f}",
        )
    return table


def _first_token(first: "FirstToken") -> "Table":
    from kvweave.cli.output import seconds
    from kvweave_lab.report import text_table

    table = text_table(
        ("first token", "median", "smallest", "largest"),
        title=f"{first.rounds} requests of up to {first.prompt_tokens:,} tokens, everything stored",
    )
    for name, spread in (
        ("through HTTP", first.http_s),
        ("in process", first.in_process_s),
        ("HTTP adds", first.added_s),
    ):
        table.add_row(name, *(seconds(value) for value in (spread.median, spread.low, spread.high)))
    return table


def _gaps(found: "LongestGaps | None") -> tuple[str, str, str]:
    if found is None:
        return "–", "–", "–"
    return f"{found.p50:.3f}", f"{found.p95:.3f}", f"{found.longest:.3f}"


def _seconds(found: "Percentiles | None") -> tuple[str, str, str]:
    if found is None:
        return "–", "–", "–"
    return f"{found.p50:.3f}", f"{found.p95:.3f}", f"{found.p99:.3f}"
