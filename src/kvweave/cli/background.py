"""idle and calibrate: do background work now, or whenever no request is running, and show what it did."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from kvweave.background.conditions import IdleStatus
    from kvweave.state.calibration_results import CalibrationResult

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
    actions = {"--watch": watch, "--status": status, "--chunks-only": chunks_only}
    if len(given := [flag for flag, is_given in actions.items() if is_given]) > 1:
        raise InvalidRequest(f"{' and '.join(given)} do not go together; give one of them")
    if status:
        _show_status(options, json)
    elif chunks_only:
        from kvweave.cli.preparation import prepare_left

        prepare_left(options, quiet=json or quiet)
    else:
        _work(options, watch, low_load, json, quiet)


def _work(options: opt.SharedOptions, watch: bool, low_load: bool, json: bool, quiet: bool) -> None:
    from kvweave.cli.output import STDOUT, print_json, progress_bar, seconds

    with options.open_kb() as base, progress_bar(quiet or json) as report:
        if watch:
            base.watch_idle(threading.Event(), report)  # returns on Ctrl-C
            return
        done = base.idle(report, low_load=low_load)
    if json:
        print_json(done)
        return
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


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    *("prepare", "storage", "calibrate_tokens"),
)
def calibrate(
    *,
    options: opt.SharedOptions,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help='JSONL file of questions ({"question": "…"} per line) to use instead of stored ones.',
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the current result without measuring.")] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Find the cheapest recipe that answers like full attention, and make it recipe auto."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar, say, seconds

    given = None if questions is None else _questions_in(questions)
    with options.open_kb() as base, progress_bar(quiet or json or show) as report:
        if not show:
            base.calibrate(given, report)
        found, judging = base.calibration(), base.judging()
    if json:
        print_json(
            {
                "told": found.summary,
                "verdict": found.result,
                "note": found.note,
                "due": found.needed,
                "judging": judging,
            }
        )
        return
    if found.result is not None:
        result = found.result
        _print_trials(result)
        STDOUT.print(
            f"{result.questions} questions: {result.asked} asked, {result.predicted} predicted, {result.given} given; "
            f"{result.model}, {seconds(result.seconds)}, {result.passes:.1f} passes each"
        )
    say(f"auto is {found.summary}")
    say(f"cached answers to questions in other words: {judging}")


def _print_trials(result: "CalibrationResult") -> None:
    from rich.table import Table

    from kvweave.cli.output import STDOUT

    columns = (
        "recipe",
        "ratio",
        "questions",
        "tokens kept",
        "first tokens",
        "answers",
        "passes",
        "B/token",
        "offline passes",
        "",
    )
    table = Table(*columns, box=None, header_style="bold")
    for trial in result.trials:
        table.add_row(
            trial.recipe,
            f"{trial.budget:g}",
            f"{trial.questions}",
            f"{trial.tokens:.1%} ({trial.tokens_interval[0]:.0%}–{trial.tokens_interval[1]:.0%})"
            if trial.questions
            else "",
            f"{trial.first_tokens}",
            f"{trial.answers}",
            f"{trial.passes:.2f}",
            f"{trial.bytes_per_token:,.0f}",
            f"{trial.offline_passes}",
            "keeps" if trial.keeps else "",
        )
    STDOUT.print(table)


def _questions_in(path: Path) -> list[str]:
    """Return the questions of a file of JSON lines. Raises InvalidRequest for any other line."""
    found: dict[str, None] = {}
    for number, value in opt.json_lines(path):
        question = value.get("question") if isinstance(value, dict) else None
        if not isinstance(question, str) or not question.strip():
            raise InvalidRequest(
                f'line {number} of {path} is no JSON object like {{"question": "When is it?"}}'
            )
        found[question] = None
    return list(found)
