"""bench: the command that loads a server for minutes, kills it and checks what became of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.serving.soak import SoakBench, SoakSettings

OUTCOMES = ("answered", "refused", "stopped", "left", "interrupted", "failed")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """The options of `bench soak`: the load on the server, and the folder for results."""

    model: Annotated[
        str | None, typer.Option("--model", help="The model to serve. Default: the shipped reference model.")
    ] = None
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.05, help="Minutes of traffic before the first kill.")
    ] = 10.0
    warm_up: Annotated[
        float,
        typer.Option("--warm-up", min=0, max=1, help="Share of the traffic time before memory is measured."),
    ] = 0.25
    users: Annotated[
        int, typer.Option("--users", min=1, help="Number of users who send requests at once.")
    ] = 16
    kills: Annotated[
        int, typer.Option("--kills", min=0, help="Number of times that the server is killed under load.")
    ] = 3
    load_s: Annotated[
        float,
        typer.Option(
            "--load-seconds",
            min=0.1,
            help="Longest time of load in seconds before a kill, and before SIGTERM.",
        ),
    ] = 10.0
    document_tokens: Annotated[
        int, typer.Option("--document-tokens", min=8, help="Tokens of each document that a request sends.")
    ] = 256
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 16
    server_flag: Annotated[
        list[str] | None, typer.Option("--server-flag", help="A flag for `kvweave serve`; repeatable.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the users' actions.")] = 0
    folder: bench.Folder = None
    output: Annotated[Path | None, typer.Option("--output", help="Folder for soak.json.")] = None

    def settings(self) -> "SoakSettings":
        """Return the settings of the soak."""
        from kvweave_lab.bench.serving.soak import SoakSettings

        return SoakSettings(
            model=self.model,
            seconds=60 * self.minutes,
            warm_up_s=60 * self.minutes * self.warm_up,
            users=self.users,
            kills=self.kills,
            load_s=self.load_s,
            document_tokens=self.document_tokens,
            new_tokens=self.new_tokens,
            flags=tuple(self.server_flag or ()),
            seed=self.seed,
        )


@keeps_nothing
@opt.with_options()
def soak(*, options: SoakOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Load a server with mixed traffic, kill it, end it, and check that nothing was lost. Exit code 1 if it did not hold."""
    from kvweave.cli.output import STDERR, STDOUT, print_json, progress_bar
    from kvweave.results import facts
    from kvweave_lab.bench.serving.soak import bench_soak
    from kvweave_lab.report import json_bytes, write_files

    opt.quiet_libraries()
    with bench.temporary_folder(options.folder) as place, progress_bar(quiet or json) as report:
        done = bench_soak(options.settings(), place, report)
    content = {**facts(done), "problems": done.problems, **bench.environment()}
    files = write_files(options.output, {"soak.json": json_bytes(content)}) if options.output else []
    if json:
        print_json(content)
    else:
        STDOUT.print(_table(done))
        STDOUT.print(_summary(done), markup=False, soft_wrap=True)
        bench.print_paths(files)
    for problem in done.problems:
        STDERR.print(problem, markup=False, soft_wrap=True)
    if done.problems:
        raise typer.Exit(1)


def _table(done: "SoakBench") -> "Table":
    from kvweave_lab.report import text_table

    asked = done.settings
    table = text_table(
        ("requests", *OUTCOMES, "median, p95, longest wait"),
        title=f"{asked.users} users for {asked.seconds / 60:g} minutes, then {asked.kills} kills and SIGTERM",
        caption="stopped: refused or cancelled with an error as the server ended; left: by the user; interrupted: by a kill; "
        "failed: lost",
    )
    for action, counts in done.outcomes.items():
        waits = done.waits.get(action)
        shown = f"{waits.median_s:.1f}, {waits.p95_s:.1f}, {waits.longest_s:.1f} s" if waits else ""
        table.add_row(action, *(f"{counts.get(outcome, 0):,}" for outcome in OUTCOMES), shown)
    table.add_section()
    rows = done.outcomes.values()
    table.add_row("all", *(f"{sum(row.get(outcome, 0) for row in rows):,}" for outcome in OUTCOMES), "")
    return table


def _summary(done: "SoakBench") -> str:
    from kvweave.cli.output import amount
    from kvweave.results import facts

    checked = [restart.damage.checked for restart in done.restarts] + [done.damage.checked]
    lines = [f"entries verified after each end: {', '.join(f'{count:,}' for count in checked)}"]
    for name, trend in facts(done.memory).items() if done.memory is not None else ():
        lines.append(
            f"{name} memory after the warm-up: {amount(round(trend['first_bytes']))}, at the end "
            f"{amount(round(trend['last_bytes']))} ({trend['growth']:+.1%}), at most {amount(trend['peak_bytes'])}; "
            f"{trend['slope_bytes_per_minute'] / 1e6:+.2f} MB a minute"
        )
    lines.append("it held" if not done.problems else f"{len(done.problems)} problems")
    return "\n".join(lines)
