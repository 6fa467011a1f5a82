"""lab/docs/methods.md and lab/docs/methods-by-task.md: every recipe as its docstring has it, with what was measured beside it.

Reads no files: `build.py` hands over what benchmarks left, None for what was not run.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED, folded, header
from tables import row as table_row

from kvweave.recipes.methods import named_parts
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.summary import OVERALL

Methods = Mapping[str, Callable[[], Recipe]]
Result = Mapping[str, Any]

HEADINGS = ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations", "Measured")
_SEE_HERE = "see the methods page"
_NEVER = "–"


def headings(make: Callable[[], Recipe]) -> dict[str, str]:
    """A method's docstring by its fixed headings, each on one line, and its first sentence under the empty one."""
    text = inspect.getdoc(make) or ""
    found = re.findall(
        rf"^({'|'.join(HEADINGS)}): (.*?)(?=\n(?:{'|'.join(HEADINGS)}): |\Z)", text, re.M | re.S
    )
    return {"": text.split("\n")[0]} | {name: " ".join(said.split()) for name, said in found}


def methods_page(
    methods: Methods,
    quality: Result | None,
    every_task: Result | None,
    nearest: Result | None,
    cost: Result | None,
    images: Iterable[str],
) -> str:
    """The page.

    `every_task` is about all tasks at a few ratios, `nearest` about those that came nearest to our own, on other prompts;
    `images` are the names of files in docs/images.
    """
    shares = {row["recipe"]: row for row in cost["rows"]} if cost else {}
    return "\n".join(
        [
            "# Methods",
            "",
            "Every recipe by its name; `kvweave ask --recipe NAME` runs it, `--prepare NAME` gives it chunks prepared another way,",
            "`--ratio` or `--coverage` sets how much it recomputes. This page is written by `lab/pages/build.py` from the recipes'",
            "docstrings and from what `lab/experiments/` measured.",
            "",
            "## Scores",
            "",
            *_scores(quality, [OVERALL]),
            *_pictures(images),
            "## All tasks",
            "",
            *_every_task(every_task),
            *_nearest(nearest),
            "## Our own beside the others",
            "",
            *_beside_own(quality),
            "## Preparation × selector",
            "",
            *_matrices(quality),
            "## What selecting costs",
            "",
            *_costs(cost),
            "## Every method",
            "",
            *(line for name, make in methods.items() for line in _method(name, make, quality, shares)),
        ]
    )


def tasks_page(quality: Result | None) -> str:
    """The same scores task by task."""
    tasks = dict.fromkeys(row["task"] for row in quality["rows"]) if quality else []
    return "\n".join(
        [
            "# Methods, task by task",
            "",
            "The mean over all tasks and the methods themselves stand in [methods.md](methods.md).",
            "",
            *_scores(quality, [task for task in tasks if task != OVERALL]),
        ]
    )


def _scores(quality: Result | None, tasks: Sequence[str]) -> list[str]:
    """Score by recipe and ratio, length by length and task by task; normalised ones beside the mean over tasks."""
    if quality is None:
        return [NOT_MEASURED, ""]
    lines = [
        f"On the shipped reference model, `{quality['split']}` split, chunks of up to {quality['chunk_tokens']} tokens, with 95 % intervals. "
        f"Tasks: {', '.join(f'`{task}`' for task in dict.fromkeys(row['task'] for row in quality['rows']) if task != OVERALL)}.",
        "",
        *folded(_commands(quality), quality["date"]),
        "",
    ]
    rows = [row for row in quality["rows"] if _named_alone(row["recipe"])]
    for context_tokens in sorted({row["context_tokens"] for row in rows}):
        for task in tasks:
            here = [row for row in rows if (row["context_tokens"], row["task"]) == (context_tokens, task)]
            if not here:
                continue
            named = "mean over tasks" if task == OVERALL else f"`{task}`"
            measures = ["score", "normalised"] if task == OVERALL else ["score"]
            for measure in measures:
                title = f"{slices.length_named(context_tokens)}, {named}, {measure}"
                lines += [f"### {title[0].upper()}{title[1:]}", "", *_by_ratio(here, measure), ""]
    return lines


def _named_alone(recipe: str) -> bool:
    """Whether a row is about a method on the preparation it comes with; the others stand in the matrix."""
    return "+" not in recipe


def _by_ratio(rows: Sequence[Result], measure: str) -> list[str]:
    """A line per recipe, a column per ratio; coverages have a table of their own, with what they came to."""
    ratios = sorted({row["ratio"] for row in rows if row["ratio"] is not None})
    cells = {(row["recipe"], row["ratio"]): row for row in rows}
    lines = header("recipe", *(f"{ratio:.0%}" for ratio in ratios))
    for recipe in dict.fromkeys(row["recipe"] for row in rows if row["ratio"] is not None):
        lines.append(
            table_row(f"`{recipe}`", *(_estimate(cells.get((recipe, ratio)), measure) for ratio in ratios))
        )
    covered = [row for row in rows if row.get("coverage") is not None]
    if covered:
        lines += ["", *header("recipe", "coverage", measure, "context tokens computed")]
        for row in covered:
            cell = (f"{row['coverage']:g}", _estimate(row, measure), f"{row['rows']:.0f}")
            lines.append(table_row(f"`{row['recipe']}`", *cell))
    return lines


def _every_task(quality: Result | None) -> list[str]:
    """A line per recipe, a column per task; those that reuse solves are here to show that nothing breaks them."""
    if quality is None:
        return [NOT_MEASURED, ""]
    rows = [row for row in quality["rows"] if _named_alone(row["recipe"]) and row["ratio"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for length in sorted({row["context_tokens"] for row in rows}):
        cells = {
            (row["recipe"], row["ratio"], row["task"]): row for row in rows if row["context_tokens"] == length
        }
        lines += [
            f"{slices.length_named(length)}, `{quality['split']}` split, {quality['rows'][0]['samples']} prompts of each task; score.",
            "",
            *header("recipe", "ratio", *(f"`{task}`" if task != OVERALL else "mean" for task in tasks)),
        ]
        for recipe, ratio in dict.fromkeys((recipe, ratio) for recipe, ratio, _ in cells):
            found = [cells.get((recipe, ratio, task)) for task in tasks]
            scores = (_NEVER if one is None else f"{one['score']:.3f}" for one in found[:-1])
            lines.append(table_row(f"`{recipe}`", f"{ratio:.0%}", *scores, _estimate(found[-1], "score")))
        lines.append("")
    return [*lines, *_verdicts_beside(quality), *folded(_commands(quality), quality["date"]), ""]


def _nearest(quality: Result | None) -> list[str]:
    """The same comparison on new prompts, more of them where recipes differ, and without the first answer."""
    if quality is None:
        return []
    counts: dict[int, list[str]] = {}
    found = dict.fromkeys((row["task"], row["samples"]) for row in quality["rows"] if row["task"] != OVERALL)
    for task, samples in found:
        counts.setdefault(samples, []).append(f"`{task}`")
    prompts = ", ".join(
        f"{samples} of {_listed(tasks)}" for samples, tasks in sorted(counts.items(), reverse=True)
    )
    return [
        "### The nearest ones, on other prompts",
        "",
        "Two recipes that come near `weave` ran again beside it, on prompts of other seeds, more of the tasks on which recipes differ:",
        f"{prompts}. What follows counts these prompts alone, every task alike.",
        "",
        *_beside_own(quality),
        *folded(_commands(quality), quality["date"]),
        "",
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _beside_own(quality: Result | None) -> list[str]:
    """What our own recipe gains on every other, by ratio; pairs of a preparation and a selector in one line each."""
    if quality is None or not quality["beside_own"]:
        return [NOT_MEASURED, ""]
    lines = []
    for length in sorted({one["context_tokens"] for one in quality["beside_own"]}):
        here = [
            one
            for one in quality["beside_own"]
            if one["context_tokens"] == length and one["ratio"] is not None
        ]
        ratios = sorted({one["ratio"] for one in here})
        cells = {(one["recipe"], one["ratio"]): one for one in here}
        lines += [
            f"{slices.length_named(length)}: the score of `weave` minus the other's at the same ratio, mean over tasks, prompt by prompt.",
            "",
            *header("recipe", *(f"{ratio:.0%}" for ratio in ratios)),
        ]
        for recipe in dict.fromkeys(one["recipe"] for one in here if _named_alone(one["recipe"])):
            found = (cells.get((recipe, ratio)) for ratio in ratios)
            lines.append(table_row(f"`{recipe}`", *(_estimate(one, "gain", "+.3f") for one in found)))
        lines.append("")
    return [*lines, *_verdicts_beside(quality)]


def _verdicts_beside(quality: Result) -> list[str]:
    """Ratio by ratio: than how many others our own is better or worse, and which are not clearly behind it."""
    lines = []
    cells = [one for one in quality["beside_own"] if one["ratio"] is not None]
    for length, ratio in sorted({(one["context_tokens"], one["ratio"]) for one in cells}):
        here = [one for one in cells if (one["context_tokens"], one["ratio"]) == (length, ratio)]
        better = [one for one in here if one["gain_interval"][0] > 0]
        worse = [one for one in here if one["gain_interval"][1] < 0]
        level = _names(one for one in here if one not in better and one not in worse)
        said = f"{slices.length_named(length)}, {ratio:.0%}: `weave` scores higher than {len(better)} of {len(here)} others"
        if worse:
            said += f", lower than {', '.join(_names(worse))}"
        if level:
            said += f"; the interval holds 0 for {', '.join(level)}"
        lines.append(f"- {said}.")
    return [*lines, ""] if lines else []


def _names(cells: Iterable[Result]) -> list[str]:
    return [f"`{one['recipe']}`" for one in cells]


def _commands(quality: Result) -> list[str]:
    return [*quality["evaluations"], quality["command"]]


def _pictures(images: Iterable[str]) -> list[str]:
    shown = [name for name in sorted(images) if name.startswith("methods-")]
    return [line for name in shown for line in (f"![{_spoken(name)}](images/{name})", "")]


def _spoken(name: str) -> str:
    return name.removesuffix(".png").replace("-", " ")


def _matrices(quality: Result | None) -> list[str]:
    """Per cell score, normalised score and gain; per preparation, how many selectors it lifts."""
    matrices = (quality or {}).get("matrices") or []
    if not matrices:
        return [NOT_MEASURED, ""]
    lines = []
    for matrix in matrices:
        cells = {(cell["selector"], cell["preparation"]): cell for cell in matrix["cells"]}
        lines += [
            f"{slices.length_named(matrix['context_tokens'])}, ratio {matrix['ratio']:g}, mean over tasks: score, normalised score, and"
            " the difference from the same selector on isolated chunks, prompt by prompt, with 95 % intervals.",
            "",
            *header("selector", *(f"`{name}`" for name in matrix["preparations"])),
        ]
        for selector in matrix["selectors"]:
            found = (cells.get((selector, preparation)) for preparation in matrix["preparations"])
            lines.append(table_row(f"`{selector}`", *map(_cell, found)))
        lines += ["", *(f"- {said}" for said in _verdicts(matrix)), ""]
    return lines


def _cell(cell: Result | None) -> str:
    if cell is None:
        return _NEVER
    said = [_estimate(cell, "score"), f"n {_estimate(cell, 'normalised')}"]
    if cell["gain"] is not None:
        said.append(_estimate(cell, "gain", "+.3f"))
    return "<br>".join(said)


def _verdicts(matrix: Result) -> list[str]:
    found = []
    for preparation in matrix["preparations"]:
        gains = [
            cell["gain_interval"]
            for cell in matrix["cells"]
            if cell["preparation"] == preparation and cell["gain_interval"] is not None
        ]
        if gains:
            lifted, lowered = sum(low > 0 for low, _ in gains), sum(high < 0 for _, high in gains)
            found.append(
                f"`{preparation}` lifts {lifted} of {len(gains)} selectors and lowers {lowered}; of the others the interval holds 0."
            )
    return found


def _costs(cost: Result | None) -> list[str]:
    if cost is None:
        return [NOT_MEASURED, ""]
    where = f"{cost['threads']} CPU threads" if cost["device"] == "cpu" else cost["device"]
    lines = [
        f"As a share of full prefill of {cost['prompt_tokens']:,} tokens ({cost['full_s']:.2f} s) in the shape of {cost['shape']} "
        f"({cost['dtype']}, random weights, {where}), chunks of {cost['chunk_tokens']} tokens, ratio {cost['ratio']:g}: median of "
        f"{cost['repeats']} interleaved repeats, and their range. Laying out stored KV belongs to the whole, not to the selection.",
        "",
        *header("recipe", "selection", "until the first token"),
    ]
    for row in sorted(cost["rows"], key=lambda row: row["select_over_full"]):
        shares = (_share(row, name) for name in ("select", "ttft"))
        lines.append(table_row(f"`{row['recipe']}`", *shares))
    lines += ["", *(f"- `{name}` was left out: {why}" for name, why in cost["left_out"].items())]
    return [*lines, f"`{cost['command']}`, {cost['date']}.", ""]


def _share(row: Result, name: str) -> str:
    low, high = row[f"{name}_over_full_range"]
    return f"{row[f'{name}_over_full']:.1%} ({low:.1%}–{high:.1%})"


def _method(
    name: str, make: Callable[[], Recipe], quality: Result | None, shares: Mapping[str, Result]
) -> list[str]:
    said = headings(make)
    _, preparation = named_parts(name)
    lines = [f"### `{name}`", "", said[""], ""]
    lines += [f"- **{heading}**: {said[heading]}" for heading in HEADINGS[:-1]]
    if preparation is not None:
        lines.append(f"- **Prepared**: `{preparation}`")
    measured = _in_short(name, quality)
    if name in shares:
        measured.append(f"selecting costs {_share(shares[name], 'select')} of full prefill")
    elsewhere = said["Measured"].removeprefix(_SEE_HERE).strip("; .")
    measured += [elsewhere] if elsewhere else []
    return [*lines, f"- **Measured**: {'; '.join(measured) or NOT_MEASURED.lower().rstrip('.')}.", ""]


def _in_short(name: str, quality: Result | None) -> list[str]:
    """Normalised scores by ratio, length by length."""
    rows = [
        row
        for row in (quality["rows"] if quality else [])
        if (row["task"], row["recipe"]) == (OVERALL, name) and row["ratio"] is not None
    ]
    return [
        f"normalised {', '.join(_at(row) for row in rows if row['context_tokens'] == length)} ({slices.length_named(length)})"
        for length in dict.fromkeys(row["context_tokens"] for row in rows)
    ]


def _at(row: Result) -> str:
    value = _NEVER if row["normalised"] is None else f"{row['normalised']:.2f}"
    return f"{value} at {row['ratio']:.0%}"


def _estimate(row: Result | None, measure: str, form: str = ".3f") -> str:
    if row is None or row[measure] is None:
        return _NEVER
    low, high = row[f"{measure}_interval"]
    return f"{row[measure]:{form}} ({low:{form}}–{high:{form}})"
