"""The generated parts of lab/docs/real-models.md: start, the first question, weights, GPU, rows in the last window, calibration, and quality
against time."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from markdown_parts import NOT_MEASURED, Result, folded, if_measured, table

from kvweave_lab.bench.start_trace import OWN_CODE
from kvweave_lab.real_models import MODELS

CALIBRATIONS = tuple(f"calibration_{name}.json" for name in MODELS)
FALLBACKS = tuple(f"fallback_{name}.json" for name in MODELS)
"""`about` and `fallbacks` of a natural.json."""
FILES = (
    "start.json",
    "first_question.json",
    "weights.json",
    "weights_gpu.json",
    "ttft_gpu.json",
    "last_window.json",
    *CALIBRATIONS,
    *FALLBACKS,
)
KEPT = "kept_*.json"
"""Evaluations by budget, kept_MODEL_LENGTH.json: copies of natural.json."""
LEAST_S = 0.1
"""Parts of a start that take less time are combined in one row."""


def parts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each part of the page, from the results by file name."""
    return {
        "start": _start(found["start.json"]),
        "first-question": _first_question(found["first_question.json"]),
        "weights": _weights(found["weights.json"]),
        "weights-gpu": _weights(found["weights_gpu.json"]),
        "ttft-gpu": _ttft(found["ttft_gpu.json"]),
        "last-window": _last_window(found["last_window.json"]),
        "calibration": "\n\n".join(_calibration(found[name]) for name in CALIBRATIONS),
        "fallback": "\n\n".join(_fallbacks(found[name]) for name in FALLBACKS),
        "kept": "\n\n".join(_kept_by_model(*each) for each in kept_runs(found).items()) or NOT_MEASURED,
    }


def kept_runs(found: Mapping[str, Any]) -> dict[str, list[Result]]:
    """Return the evaluations by budget of each model, the shortest context first."""
    runs: dict[str, list[Result]] = {}
    for name in sorted(found):
        if fnmatch(name, KEPT) and found[name] is not None:
            model = name.removeprefix("kept_").rpartition("_")[0]
            runs.setdefault(model, []).append(found[name])
    for own in runs.values():
        own.sort(key=lambda run: run["rows"][0]["context_tokens"])
    return runs


def kept_image(model: str) -> str:
    """Return the name of a model's figure in lab/docs/images."""
    return f"kept-{model}.png"


@if_measured
def _start(measured: Result) -> str:
    rows = measured["rows"]
    names = list(dict.fromkeys(part for each in rows for part in each["parts"]))
    spent = {name: [each["parts"].get(name, 0.0) for each in rows] for name in names}
    long = sorted((name for name in names if max(spent[name]) >= LEAST_S), key=lambda name: -max(spent[name]))
    short = [sum(spent[name][column] for name in names if name not in long) for column in range(len(rows))]
    lines = table(
        ("processor seconds", *(each["command"] for each in rows)),
        [
            *((name, *(_seconds(value) for value in spent[name])) for name in long),
            (f"parts below {LEAST_S} s", *(_seconds(value) for value in short)),
            ("**all**", *(_range(each["cpu_s"]) for each in rows)),
            ("**ours**", *(_range(each["own_s"]) if each["parts"] else "" for each in rows)),
            (
                "of it kvweave's own code",
                *(_seconds(sum(each["parts"].get(name, 0.0) for name in OWN_CODE)) for each in rows),
            ),
            ("on the clock", *(_range(each["wall_s"]) for each in rows)),
        ],
    )
    return "\n".join([*lines, "", *folded([measured["command"]], _about(measured))])


@if_measured
def _first_question(measured: Result) -> str:
    said = (
        f"`kvweave add` with {measured['pages']} pages ({measured['chunks']} chunks) returned after {measured['add_s']:.1f} s, and "
        f"the first piece of an answer came {measured['first_piece_s']:.1f} s after `kvweave ask`: **{measured['together_s']:.1f} s "
        f"together**, measured once; the target is {measured['target_s']:.0f} s. When the answer ended, {measured['without_vector_after_answer']} chunks had no vector yet; the "
        "question found them by their words."
    )
    return "\n".join([said, "", *folded([f".venv/bin/python {measured['command']}"], _about(measured))])


def _weights(runs: Sequence[Result] | None) -> str:
    if not runs:
        return NOT_MEASURED
    machines = {_about(run) for run in runs}
    lines: list[str] = []
    for run in runs:
        asked = run["settings"]
        where = f", {_about(run)}" if len(machines) > 1 else ""
        lines += [
            f"**{_name(run['model'])}**{where}, prompt of {asked['prompt_tokens']:,} tokens, "
            f"{asked['ratio']:.0%} recomputed:",
            "",
            *table(
                (
                    "weights",
                    "held",
                    "prefill",
                    "×",
                    "recomputation",
                    "×",
                    "per token",
                    "×",
                    "KL",
                    "same next token",
                ),
                [_variant(each) for each in run["variants"]],
            ),
            "",
        ]
    note = machines.pop() if len(machines) == 1 else "each on every processor"
    return "\n".join([*lines, *folded(list(dict.fromkeys(run["command"] for run in runs)), note)])


def _variant(each: Result) -> tuple[str, ...]:
    quality = each.get("quality")
    speeds = [each.get(step) for step in ("prefill", "recompute", "decode")]
    return (
        _name(each["name"]),
        f"{each['weight_bytes'] / 1e6:,.0f} MB",
        *(
            cell
            for speed in speeds
            for cell in (
                ("", "")
                if speed is None
                else (f"{speed['seconds']['median'] * 1e3:,.0f} ms", f"{speed['of_first']['median']:.2f}")
            )
        ),
        f"{quality['kl']:.4f}" if quality else "",
        f"{quality['agreement']:.1%}" if quality else "",
    )


@if_measured
def _ttft(measured: Result) -> str:
    lines = table(
        (
            "context",
            "recipe",
            "ratio",
            "full prefill",
            "first token",
            "speed-up",
            "of it copying KV to the GPU",
        ),
        [
            (
                f"{each['context_tokens']:,}",
                each["recipe"],
                f"{each['ratio']:g}",
                f"{each['full_s'] * 1e3:,.0f} ms",
                f"{each['ttft_s'] * 1e3:,.0f} ms",
                f"{each['speedup']:.2f}×",
                f"{each['place_s'] * 1e3:,.0f} ms",
            )
            for each in measured["rows"]
        ],
    )
    return "\n".join([*lines, "", *folded([measured["command"]], _about(measured))])


@if_measured
def _last_window(measured: Result) -> str:
    lines: list[str] = []
    for model in measured["models"]:
        lines += [
            f"**{model['family']}**, {model['context_tokens']:,} tokens, window {model['window']}, {measured['ratio']:.0%} "
            f"recomputed, {model['prompts']} prompts; rows drawn evenly: {model['even']:.0%}:",
            "",
            *table(
                (
                    "recipe",
                    "in the last window, all layers vote",
                    "with the rule",
                    "evidence, all",
                    "with the rule",
                ),
                [
                    (each["recipe"], *_shares(each, "last_window"), *_shares(each, "evidence"))
                    for each in model["rows"]
                ],
            ),
            "",
        ]
    return "\n".join([*lines, *folded([measured["command"]], _about(measured))])


@if_measured
def _calibration(measured: Result) -> str:
    recipe, budget = measured["chosen"]
    said = f"`{recipe}` at {budget:g}" if budget else f"`{recipe}`"
    lines = [
        f"{_asked(measured)}: {measured['tokens']:.0%} of the tokens of answers are kept by {said}. The measurement took "
        f"{measured['seconds']:,.0f} s with preparing the chunks, and {measured['passes']:.1f} passes over each prompt:",
        "",
        *table(
            (
                "recipe",
                "ratio",
                "questions",
                "tokens kept",
                "first tokens kept",
                "answers kept",
                "passes",
                "bytes per token",
            ),
            [
                (
                    each["recipe"],
                    f"{each['budget']:g}",
                    f"{each['questions']}",
                    f"{each['tokens']:.1%} ({each['tokens_interval'][0]:.1%}–{each['tokens_interval'][1]:.1%})",
                    f"{each['first_tokens']}",
                    f"{each['answers']}",
                    f"{each['passes']:.2f}",
                    f"{each['bytes_per_token']:,.0f}",
                )
                for each in measured["trials"]
            ],
        ),
    ]
    return "\n".join([*lines, "", *folded([measured["command"]], _about(measured))])


def _kept_by_model(model: str, runs: Sequence[Result]) -> str:
    lines = [f"![answers of {model} kept against time](images/{kept_image(model)})", ""]
    for run in runs:
        about, rows = run["about"], run["rows"]
        lines += [
            f"**{model}**, {about['dtype']}, contexts of {rows[0]['context_tokens']:,} tokens in chunks of at most "
            f"{about['chunk_tokens']}, {rows[0]['prompts']} prompts:",
            "",
            *table(
                (
                    "recipe",
                    "ratio",
                    "time",
                    "offline passes",
                    "bytes per token",
                    "KL",
                    "first tokens kept",
                    "tokens kept",
                    "answers the same",
                    "right answers kept",
                    "right",
                ),
                [_kept_row(row) for row in sorted(rows, key=lambda row: row["time"])],
            ),
            "",
        ]
    commands = [run["about"]["command"] for run in runs]
    return "\n".join([*lines, *folded(list(dict.fromkeys(commands)), _about(runs[-1]["about"]))])


@if_measured
def _fallbacks(measured: Result) -> str:
    about, rows = measured["about"], measured["fallbacks"]
    lines = [
        f"**{about['model']}**, {about['dtype']}, contexts of {rows[0]['context_tokens']:,} tokens in chunks of at most "
        f"{about['chunk_tokens']}, {rows[0]['prompts']} prompts:",
        "",
        *table(
            ("recipe", "ratio", "margin", "answers the same", "fell back", "time", "prefill and fallback"),
            [_fallback_row(each) for each in rows],
        ),
        "",
    ]
    return "\n".join([*lines, *folded([about["command"]], _about(about))])


def _fallback_row(row: Result) -> tuple[str, ...]:
    def cell(name: str, form: str) -> str:
        low, high = row[f"{name}_interval"]
        return f"{row[name]:{form}} ({low:{form}}–{high:{form}})"

    return (
        row["recipe"],
        f"{row['ratio']:g}",
        f"{row['margin']:g}",
        cell("same_answer", ".0%"),
        cell("fell_back", ".0%"),
        cell("time", ".2f"),
        cell("prefill", ".2f"),
    )


def _kept_row(row: Result) -> tuple[str, ...]:
    def cell(name: str, form: str = ".0%") -> str:
        if row[name] is None:
            return "–"
        low, high = row[f"{name}_interval"]
        return f"{row[name]:{form}} ({low:{form}}–{high:{form}})"

    budget = "–" if row["ratio"] is None else f"{row['ratio']:g}"
    if row["coverage"] is not None:
        budget = f"{row['coverage']:g} of scores"
    return (
        row["recipe"],
        budget,
        cell("time", ".2f"),
        "–" if row["offline_passes"] is None else f"{row['offline_passes']:.1f}",
        "–" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:,.0f}",
        cell("answer_kl", ".3f"),
        cell("same_first"),
        cell("agreed"),
        cell("same_answer"),
        cell("kept_right"),
        cell("contains"),
    )


def _asked(measured: Result) -> str:
    about = len(measured["documents"]) or "the sample"
    return (
        f"**{measured['model']}**, {measured['questions']} questions about {about} documents, {measured['top_k']} chunks of at most "
        f"{measured['chunk_tokens']} tokens"
    )


def _shares(row: Result, name: str) -> tuple[str, str]:
    values = (row[when][name] for when in ("before", "after"))
    before, after = (f"{each['value']:.0%} ({each['low']:.0%}–{each['high']:.0%})" for each in values)
    return before, after


def _name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value else ""


def _range(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['low']:.2f}–{values['high']:.2f})"


def _about(measured: Result) -> str:
    return f"{measured['machine']}, {measured['threads']} threads, {measured['date'][:10]}"
