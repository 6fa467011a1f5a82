"""idle: do background work now, or whenever no request is running; show what it did; let the system start it."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.background.runner import BackgroundReport
    from kvweave.background.service import IdleService
    from kvweave.background.status import IdleStatus

TITLES = {
    "preparation": "chunks prepared",
    "refresh": "checks of answers after documents came in",
    "answers": "questions answered again",
    "calibration": "steps of calibration",
    "population": "predicted questions computed ahead",
    "conversion": "answers decoded from stored KV",
    "abstract": "batches of chunks summarised",
    "prediction": "rounds of predictions",
    "paraphrase": "questions put in other words",
    "restoration": "questions checked for evicted KV",
}
_ORIGINS = {
    "knowledge": "documents",
    "history": "earlier questions",
    "paraphrase": "questions in other words",
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
        _show_status(options, json)
    elif uninstall:
        _uninstall(options)
    elif install:
        _install(options, print_only)
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


def _show_status(options: opt.SharedOptions, json: bool) -> None:
    """Print what background work did, what it was worth, and whether it may run now."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave.facts import facts

    with options.open_kb() as base:
        status = base.idle_status()
    service = _service_of(options)
    paths = [str(path) for path in service.files] if service is not None and service.installed else []
    if json:
        print_json({**facts(status), "reasons": list(status.reasons), "service": paths})
        return
    for line in _status_lines(status):
        STDOUT.print(line, soft_wrap=True)
    STDOUT.print(f"service: {', '.join(paths) or 'not installed; kvweave idle --install'}", soft_wrap=True)


def _status_lines(status: "IdleStatus") -> list[str]:
    from kvweave.cli.output import amount, seconds

    today, all_ = status.worth_today, status.worth
    limit = "no daily limit" if status.seconds_per_day is None else f"of {status.seconds_per_day:g} s"
    flops = "" if status.flops_per_day is None else f" of {status.flops_per_day / 1e12:.3g}"
    lines = [
        f"today: {seconds(status.spent_today.seconds)} spent, {limit}; "
        f"{status.spent_today.flops / 1e12:.3g}{flops} TFLOPs"
    ]
    lines += [f"  {TITLES.get(kind, kind)}: {jobs:,}" for kind, jobs in status.jobs_today.items()]
    lines += [
        f"made: {today.entries:,} answers and {amount(int(today.kv_bytes))} of KV today; {all_.entries:,} and "
        f"{amount(int(all_.kv_bytes))} in all",
        f"worth: {today.hits:,} of these answers given today, {all_.hits:,} in all; they saved {seconds(all_.saved_s)} of "
        f"waiting, for {seconds(status.spent.seconds)} of work",
        f"waiting: {status.waiting:,} questions",
        *_predictions(status),
        f"now: {'; '.join(status.reasons) or 'may work'}",
    ]
    return lines + [f"  {each.name}: {each.state}" for each in status.conditions]


def _predictions(status: "IdleStatus") -> list[str]:
    """Return what each kind of prediction that has been tried is worth, and what was dropped."""
    from kvweave.cli.output import seconds

    lines = []
    for origin, one in status.predictions.items():
        if one.ready or one.seconds:
            rate = "" if one.hits_per_work is None else f" ({one.hits_per_work:.2g} per answer computed)"
            lines.append(
                f"predicted from {_ORIGINS[origin]}: {one.ready:,} ready, {one.hits:,} of {one.asked:,} questions answered from them for "
                f"{seconds(one.seconds)} of work{rate}" + (f"; paused: {one.paused}" if one.paused else "")
            )
    for what, reasons in (("questions", status.dropped), ("summaries", status.summaries_dropped)):
        if reasons:
            counted = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
            lines.append(f"dropped {what}: {counted}")
    return lines


def _service_of(options: opt.SharedOptions, names: Sequence[str] = ()) -> "IdleService | None":
    """Return the service of this system for a command with the options `names`.

    None if it has no names and no service is known for the system; with names that raises InvalidRequest.
    """
    from kvweave.background.service import idle_service
    from kvweave.errors import InvalidRequest

    config = options.config()
    command = [sys.executable, "-m", "kvweave", "idle", "--low-load", "--quiet"]
    command += ["--home", str(config.home), "--kb", options.kb]
    command += opt.arguments_of(options, [name for name in names if name not in opt.KB])
    on_battery = config.idle.idle_power == "any"
    try:
        return idle_service(
            sys.platform, options.kb, command, Path.home(), config.home, on_battery=on_battery
        )
    except InvalidRequest:
        if names:
            raise
        return None


def _install(options: opt.SharedOptions, print_only: bool) -> None:
    """Write the service that starts background work, and start it; with `print_only` show what would be written."""
    from kvweave.background.service import EVERY_MINUTES, run_command
    from kvweave.cli.output import STDOUT

    with options.open_kb():  # refuses one that is not there
        service = _service_of(options, OPTIONS)
    assert service is not None
    if print_only:
        for path, content in service.files.items():
            text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
            print(f"# {path}\n{text}")
        return
    failed = service.install(run_command)
    for path in service.files:
        STDOUT.print(f"wrote {path}", soft_wrap=True, highlight=False)
    if failed:
        _tell("it could not be started; run:", failed)
    else:
        STDOUT.print(
            f"background work starts every {EVERY_MINUTES} minutes at low load; kvweave idle --status shows it"
        )
    STDOUT.print(f"undo: kvweave idle --uninstall{_kb_flag(options)}", soft_wrap=True)


def _uninstall(options: opt.SharedOptions) -> None:
    """Stop the service and delete its files."""
    from kvweave.background.service import run_command
    from kvweave.cli.output import STDOUT

    service = _service_of(options)
    removed, failed = ([], []) if service is None else service.uninstall(run_command)
    for path in removed:
        STDOUT.print(f"deleted {path}", soft_wrap=True, highlight=False)
    if failed:
        _tell("the system did not take it away; run:", failed)
    if not removed:
        STDOUT.print(f"no service is installed for {options.kb}")


def _tell(what: str, commands: Sequence[str]) -> None:
    from kvweave.cli.output import STDERR

    STDERR.print(what)
    for command in commands:
        STDERR.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def _kb_flag(options: opt.SharedOptions) -> str:
    return "" if options.kb == "default" else f" --kb {options.kb}"
