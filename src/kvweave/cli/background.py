"""idle: do background work now, or whenever no request is running; show what it did."""

import threading
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.background.conditions import IdleStatus
    from kvweave.background.runner import BackgroundReport

TITLES = {
    "preparation": "chunks prepared",
    "refresh": "checks of answers after documents came in",
    "answers": "questions answered again",
    "calibration": "steps of calibration",
    "population": "predicted questions computed ahead",
    "conversion": "answers decoded from stored KV",
    "abstract": "batches of chunks summarised",
    "prediction": "rounds of predictions",
    "restoration": "questions checked for evicted KV",
    "judging": "models tried as judges of questions",
    "promotion": "pairs of questions judged ahead",
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
        typer.Option("--status", help="Show what was done, the benefit, and whether it may run now."),
    ] = False,
    chunks_only: Annotated[
        bool,
        typer.Option("--chunks-only", help="Only prepare the chunks that an add left to the background."),
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prepare chunks, predict questions, precompute their answers, refresh cached answers. Yields to every request."""
    from kvweave.errors import InvalidRequest

    actions = {"--watch": watch, "--status": status, "--chunks-only": chunks_only}
    if len(given := [flag for flag, is_given in actions.items() if is_given]) > 1:
        raise InvalidRequest(f"{' and '.join(given)} do not go together; give one of them")
    if status:
        _show_status(options, json)
    elif chunks_only:
        from kvweave.cli.preparation import prepare

        prepare(options, quiet=json or quiet)
    else:
        _work(options, watch, low_load, json, quiet)


def _work(options: opt.SharedOptions, watch: bool, low_load: bool, json: bool, quiet: bool) -> None:
    from kvweave.cli.output import print_json, progress_bar

    with options.open_kb() as base, progress_bar(quiet or json) as report:
        if watch:
            base.watch_idle(threading.Event(), report)  # returns on Ctrl-C
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


def _show_status(options: opt.SharedOptions, json: bool) -> None:
    """Print the results and the benefit of background work, and whether it may run now."""
    from kvweave.cli.output import print_json, say
    from kvweave.results import facts

    with options.open_kb() as base:
        status = base.idle_status()
    if json:
        print_json({**facts(status), "reasons": list(status.reasons)})
        return
    for line in _status_lines(status):
        say(line)


def _status_lines(status: "IdleStatus") -> list[str]:
    from kvweave.cli.output import amount, seconds

    today, all_ = status.worth_today, status.worth
    limit = "no daily limit" if status.seconds_per_day is None else f"of {status.seconds_per_day:g} s"
    lines = [
        f"today: {seconds(status.spent_today.seconds)} spent, {limit}; "
        f"{status.spent_today.flops / 1e12:.3g} TFLOPs"
    ]
    lines += [f"  {TITLES.get(kind, kind)}: {jobs:,}" for kind, jobs in status.jobs_today.items()]
    lines += [
        f"made: {today.entries:,} answers and {amount(int(today.kv_bytes))} of KV today; {all_.entries:,} and "
        f"{amount(int(all_.kv_bytes))} in all",
        f"used: {today.hits:,} of these answers given today, {all_.hits:,} in all; they saved {seconds(all_.saved_s)} of "
        f"waiting, for {seconds(status.spent.seconds)} of work",
        f"waiting: {status.waiting:,} questions",
        *_predictions(status),
        f"now: {'; '.join(status.reasons) or 'may work'}",
    ]
    return lines + [f"  {each.name}: {each.state}" for each in status.conditions]


def _predictions(status: "IdleStatus") -> list[str]:
    """Return lines with what predictions and promotions were worth, and why predictions were dropped."""
    from kvweave.cli.output import seconds

    def took(*kinds: str) -> str:
        return seconds(sum(status.seconds.get(kind, 0.0) for kind in kinds))

    made, lines = status.predictions, []
    if made.made:
        lines.append(
            f"predicted: {made.made:,} questions, {made.dropped:,} dropped; {made.asked:,} of them asked, {made.served:,} answers given from "
            f"them, {made.rejected:,} rejected, for {took('abstract', 'prediction', 'population', 'conversion')} of work"
        )
    if status.promoted:
        lines.append(
            f"promoted: {status.promoted:,} questions got a stored answer; {status.promoted_given:,} answers given from them, for "
            f"{took('judging', 'promotion')} of work"
        )
    for what, reasons in (("questions", status.dropped), ("summaries", status.summaries_dropped)):
        if reasons:
            counted = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
            lines.append(f"dropped {what}: {counted}")
    return lines
