"""idle: do background work now, or whenever no request is running; show what it did; let the system start it."""

import threading
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.engine.background.runner import BackgroundReport

TITLES = {
    "preparation": "chunks prepared",
    "refresh": "checks of answers after documents came in",
    "answers": "questions answered again",
    "contradiction": "contradictory answers settled",
    "calibration": "steps of calibration",
    "population": "predicted questions computed ahead",
    "conversion": "answers decoded from stored KV",
    "abstract": "batches of chunks summarised",
    "prediction": "rounds of predictions",
    "paraphrase": "questions put in other words",
    "restoration": "questions checked for evicted KV",
}
OPTIONS = (*opt.KB, *opt.MODEL, *opt.REUSE, *opt.OFFLOADING, "prediction_stride", "idle_seconds_per_day")


@opt.with_options(*OPTIONS)
def idle(
    *,
    options: opt.SharedOptions,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep running, and work at low load whenever no request has come for a while."
        ),
    ] = False,
    low_load: Annotated[
        bool, typer.Option("--low-load", help="Work only while other programs leave the machine alone.")
    ] = False,
    status: Annotated[
        bool,
        typer.Option("--status", help="Show what was done, what it was worth, and whether it may run now."),
    ] = False,
    install: Annotated[
        bool, typer.Option("--install", help="Let the system start it: write a service of this user.")
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take that service away.")] = False,
    chunks_only: Annotated[
        bool,
        typer.Option("--chunks-only", help="Only prepare the chunks that an add left to the background."),
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="With --install: show what would be written, and write nothing.")
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prepare chunks, predict questions, precompute their answers, refresh cached answers. Yields to every request."""
    actions = {
        "--watch": watch,
        "--status": status,
        "--install": install,
        "--uninstall": uninstall,
        "--chunks-only": chunks_only,
    }
    _check([flag for flag, given in actions.items() if given], print_only)
    if status:
        from kvweave.cli.idle_status import show

        show(options, json)
    elif install or uninstall:
        from kvweave.cli import idle_service

        if uninstall:
            idle_service.uninstall(options)
        else:
            idle_service.install(options, OPTIONS, print_only)
    elif chunks_only:
        from kvweave.cli.preparation import prepare

        prepare(options, quiet=json or quiet)
    else:
        _work(options, watch, low_load, json, quiet)


def _check(actions: list[str], print_only: bool) -> None:
    from kvweave.errors import InvalidRequest

    if len(actions) > 1:
        raise InvalidRequest(f"{' and '.join(actions)} do not go together; give one of them")
    if print_only and actions != ["--install"]:
        raise InvalidRequest("--print shows what --install would write; give it with --install")


def _work(options: opt.SharedOptions, watch: bool, low_load: bool, json: bool, quiet: bool) -> None:
    from kvweave.cli.output import print_json, progress_bar

    opt.quiet_libraries()
    with options.open_kb() as base, progress_bar(quiet or json) as report:
        if watch:
            base.watch_idle(threading.Event(), report)  # until it is interrupted
            return
        done = base.idle(report, low_load=low_load)
    if json:
        print_json(done)
        return
    _print(done)


def _print(done: "BackgroundReport") -> None:
    from kvweave.cli.output import STDOUT, seconds

    for kind, jobs in done.jobs.items():
        STDOUT.print(f"{TITLES[kind]}: {jobs:,}")
    STDOUT.print(f"{seconds(done.seconds)}, {done.flops / 1e12:.3g} TFLOPs; {done.ended}")
