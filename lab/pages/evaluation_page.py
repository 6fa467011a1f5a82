"""The generated parts of lab/docs/evaluation.md, lab/training/README.md and the model card: scores of the shipped models."""

from collections.abc import Mapping

from markdown_parts import Result, between, folded, header, if_measured, row

from kvweave_lab.eval.rows import OVERALL

BASELINES = {"full": 1.0, "naive": 0.0, "direct": 0.0, "reuse": 0.0}
"""The recipes of these tables, each with its ratio: full attention, and those that recompute nothing."""

Cells = Mapping[tuple[int, str, str], Result]
"""Rows by length, task and recipe, in the order of the results."""


def baseline_cells(quality: Result) -> Cells:
    return {
        (one["context_tokens"], one["task"], one["recipe"]): one
        for one in quality["rows"]
        if one["recipe"] in BASELINES and one["ratio"] == BASELINES[one["recipe"]]
    }


@if_measured
def scores_of_all_tasks(quality: Result) -> str:
    """Return the scores of every task with their intervals, for lab/docs/evaluation.md."""
    model = quality["reference"]
    cells = baseline_cells(quality)
    places = dict.fromkeys((length, task) for length, task, _ in cells)
    lines = [
        f"The table has mean scores with 95 % intervals on the `{quality['split']}` split, {_prompts(cells)} for each task and length, chunks of up to "
        f"{quality['chunk_tokens']} tokens ({quality['dtype']}, {quality['device']}). `naive`, `direct` and `reuse` recompute nothing. "
        f"The model was trained on {model['tokens'] / 1e6:.0f} million tokens in {model['hours']:.1f} hours ({model['steps']:,} steps, "
        f"{model['device']}); its weights are {model['bytes'] / 1e6:.1f} MB.",
        "",
        *header("context", "task", *BASELINES),
    ]
    for length, task in places:
        scores = (_score(cells, length, task, recipe) for recipe in BASELINES)
        lines.append(row(f"{length:,}", _task(task), *scores))
    commands = [*quality["evaluations"], quality["command"]]
    lines += ["", *folded(commands, f"{quality['date']}, {quality['minutes']:.0f} minutes")]
    return "\n".join(lines)


@if_measured
def scores_of_the_model(quality: Result) -> str:
    """Return the scores of full attention and plain reuse without intervals, for the model card."""
    cells = baseline_cells(quality)
    tasks = dict.fromkeys(task for _, task, _ in cells)
    lengths = sorted({length for length, _, _ in cells})
    columns = [(length, recipe) for length in lengths for recipe in ("full", "reuse")]
    lines = [
        f"Scores on the `{quality['split']}` split, {_prompts(cells)} for each task and length; intervals and commands are in "
        "`lab/docs/evaluation.md`.",
        "",
        *header("task", *(f"{recipe}, {length:,} tokens" for length, recipe in columns)),
    ]
    for task in sorted(tasks, key=lambda name: name == OVERALL):
        numbers = (cells.get((length, task, recipe)) for length, recipe in columns)
        lines.append(row(_task(task), *("–" if one is None else f"{one['score']:.2f}" for one in numbers)))
    return "\n".join(lines)


def _task(name: str) -> str:
    return "**mean**" if name == OVERALL else f"`{name}`"


def _score(cells: Cells, length: int, task: str, recipe: str) -> str:
    """Return a score with its interval, or a dash if full attention was measured on other prompts."""
    found = cells.get((length, task, recipe))
    if found is None or found["samples"] != cells[length, task, "full"]["samples"]:
        return "–"
    return between(found["score"], *found["score_interval"])


def _prompts(cells: Cells) -> str:
    counts = {found["samples"] for (_, task, _), found in cells.items() if task != OVERALL}
    return f"{' to '.join(f'{count:,}' for count in sorted({min(counts), max(counts)}))} prompts"


@if_measured
def second_run(result: Result) -> str:
    """Return the scores of the shipped model and of a second training run on the same prompts, for lab/training/README.md."""
    rows, training = result["rows"], result["training"]
    outside = [f"`{one['task']}` at {one['context_tokens']:,}" for one in rows if not within_interval(one)]
    lines = [
        f"The table has scores with full attention on `test` with 95 % intervals, on the same {min(one['prompts'] for one in rows)} prompts of each task: of the "
        f"shipped model and of a second last training stage with seed {training['seed']} ({training['steps']:,} steps, {training['hours']:.1f} hours). In "
        f"{len(rows) - len(outside)} of {len(rows)} rows the second score is in the interval of the first one"
        + (f"; in {', '.join(outside)} it is not." if outside else "."),
        "",
        *header("context", "task", "shipped", "second run"),
    ]
    for one in rows:
        scores = (between(*one[name]) for name in ("first", "second"))
        lines.append(row(f"{one['context_tokens']:,}", f"`{one['task']}`", *scores))
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}."])


def within_interval(one: Result) -> bool:
    """Return whether a second training run's score is in the first one's interval."""
    _, low, high = one["first"]
    return bool(low <= one["second"][0] <= high)


@if_measured
def written_requests(result: Result) -> str:
    """Return the quality of the questions and summaries that the model writes, for the model card."""
    measures = {
        "ask": {
            "about_notes": "names something of the notes",
            "answered": "is answered right, asked over them",
        },
        "sum_up": {"facts_kept": "facts kept", "true_to_notes": "sentences that are true to the notes"},
        "ask_like": {
            "about_notes": "names something of the notes",
            "another": "and not what the earlier ones do",
            "answered": "is answered right",
        },
    }
    requests = {"ask": "a question", "sum_up": "key content", "ask_like": "the next question"}
    lines = [
        f"The model's texts after notes of {result['context_tokens']} tokens (`{result['split']}` split), as mean shares over kinds of notes with 95 % intervals:",
        "",
        *header("written", "prompts", "", "share"),
    ]
    for name, columns in measures.items():
        one = result["requests"][name]
        for column, words in columns.items():
            share = one["shares"][column]
            lines.append(row(requests[name], f"{one['prompts']:,}", words, between(**share)))
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}."])


@if_measured
def replayed(result: Result) -> str:
    """Return the times of the evaluation's traces in the shape of a real model, for lab/docs/evaluation.md."""
    where = f"{result['threads']} CPU threads" if result["device"] == "cpu" else result["device"]
    columns = (
        "context",
        "recipe",
        "ratio",
        "tokens",
        "computed",
        "first token",
        "full prefill",
        "share of it",
    )
    lines = [
        f"These are the mean traces of the evaluation, timed in the shape of {result['shape']} ({result['dtype']}, random weights, {where}), with all token "
        f"counts multiplied by {result['scale']:g}: the median of {result['repeats']} repeats, interleaved with full prefill of as many tokens.",
        "",
        *header(*columns),
    ]
    for one in result["rows"]:
        trace, scale = one["trace"], result["scale"]
        lines.append(
            row(
                f"{one['context_tokens']:,}",
                f"`{one['recipe']}`",
                f"{one['ratio']:g}",
                f"{scale * (trace['exact'] + trace['stale'] + trace['fresh']):,.0f}",
                f"{scale * (trace['recomputed'] + trace['fresh']):,.0f}",
                f"{one['ttft_s']:.3f} s",
                f"{one['full_ttft_s']:.3f} s",
                between(one["ttft_over_full"], *one["ttft_over_full_range"]),
            )
        )
    return "\n".join([*lines, "", *folded([*result["evaluations"], result["command"]], result["date"])])
