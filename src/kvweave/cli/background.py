"""idle: do background work now, or whenever no request is running."""

import threading
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.engine.background import BackgroundReport

_TITLES = {
    "refresh": "checks of answers after documents came in",
    "answers": "questions answered again",
    "contradiction": "contradictory answers settled",
    "population": "predicted questions computed ahead",
    "conversion": "answers decoded from stored KV",
    "abstract": "batches of chunks summarised",
    "prediction": "rounds of predictions",
    "restoration": "questions checked for evicted KV",
}


@opt.with_options(*opt.KB, *opt.MODEL, *opt.REUSE, *opt.OFFLOADING, "prediction_stride")
def idle(
    *,
    options: opt.SharedOptions,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Keep running, and work whenever no request has come for a while."),
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Predict questions, precompute their answers, refresh cached answers. Yields to every request."""
    from kvweave.cli.output import print_json, progress_bar

    opt.quiet_libraries()
    with options.open_kb() as base, progress_bar(quiet or json) as report:
        if watch:
            base.watch_idle(threading.Event(), report)  # until it is interrupted
            return
        done = base.idle(report)
    if json:
        print_json(done)
        return
    _print(done)


def _print(done: "BackgroundReport") -> None:
    from kvweave.cli.output import STDOUT, seconds

    for kind, jobs in done.jobs.items():
        STDOUT.print(f"{_TITLES[kind]}: {jobs:,}")
    STDOUT.print(f"{seconds(done.seconds)}, {done.flops / 1e12:.3g} TFLOPs; {done.ended}")
