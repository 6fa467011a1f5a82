"""calibrate: find the cheapest recipe that answers like full attention, and make it recipe auto."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.state.calibration_results import CalibrationResult


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

    given = None if questions is None else _read(questions)
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


def _read(path: Path) -> list[str]:
    """Return the questions of a file of JSON lines. Raises InvalidRequest for any other line."""
    from kvweave.errors import InvalidRequest

    found: dict[str, None] = {}
    for number, value in opt.json_lines(path):
        question = value.get("question") if isinstance(value, dict) else None
        if not isinstance(question, str) or not question.strip():
            raise InvalidRequest(
                f'line {number} of {path} is no JSON object like {{"question": "When is it?"}}'
            )
        found[question] = None
    return list(found)
