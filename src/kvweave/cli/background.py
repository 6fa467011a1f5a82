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
    "population": "predicted questions computed ahead",
    "conversion": "answers decoded from stored KV",
    "abstract": "batches of chunks summarised",
    "prediction": "rounds of predictions",
    "restoration": "questions checked for evicted KV",
}


def idle(
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    recipe: opt.Recipe = None,
    prepare: opt.Prepare = None,
    storage: opt.Storage = None,
    auxiliary: opt.Auxiliary = None,
    shared: opt.Shared = None,
    kv_budget: opt.KvBudget = None,
    resident_bytes: opt.ResidentBytes = None,
    stride: Annotated[
        int | None,
        typer.Option(
            envvar="KVWEAVE_PREDICTION_STRIDE", help="Questions predicted at a time, 1 to 5. Default: 5."
        ),
    ] = None,
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
    with (
        opt.open_kb(
            kb,
            home,
            model=model,
            dtype=dtype,
            device=device,
            recipe=recipe,
            prepare=prepare,
            storage=storage,
            auxiliary=auxiliary,
            shared=shared,
            kv_budget=kv_budget,
            resident_bytes=None if resident_bytes is None else opt.size_bytes(resident_bytes),
            prediction_stride=stride,
        ) as base,
        progress_bar(quiet or json) as report,
    ):
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
