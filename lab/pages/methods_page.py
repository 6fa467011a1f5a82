"""lab/docs/methods.md and lab/docs/methods-by-task.md: every recipe's docstring and measurements.

It reads no files: `build.py` passes the results, or None for an experiment that did not run.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header
from markdown_parts import row as table_row
from methods_findings import (
    level_with_own,
    on_own_preparation,
    own_comparisons,
    what_follows,
    what_follows_by_task,
)
from neutral_tables import NEVER, against_the_text, by_bytes, by_task, commands, estimate

from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.rows import OVERALL, length_text
from kvweave_lab.recipes.names import name_parts

Methods = Mapping[str, Callable[[], Recipe]]

HEADINGS = ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations")


def headings(make: Callable[[], Recipe]) -> dict[str, str]:
    """Return a method's docstring by its fixed headings, each on one line; the first sentence has an empty heading."""
    text = inspect.getdoc(make) or ""
    found = re.findall(
        rf"^({'|'.join(HEADINGS)}): (.*?)(?=\n(?:{'|'.join(HEADINGS)}): |\Z)", text, re.M | re.S
    )
    return {"": text.split("\n")[0]} | {name: " ".join(section.split()) for name, section in found}


def methods_page(
    methods: Methods,
    neutral: Result | None,
    permuted: Result | None,
    fixed: Result | None,
    cost: Result | None,
    images: Iterable[str],
) -> str:
    """Return the text of lab/docs/methods.md.

    Args:
        methods: every recipe's name and the function that makes it.
        neutral: scores on tasks that favour no placement.
        permuted: scores on the same tasks with chunks against the order of the text.
        fixed: scores by ratio on three tasks that favour the beginnings of chunks.
        cost: times of selecting tokens.
        images: names of the files in lab/docs/images.
    """
    shares = {row["recipe"]: row for row in cost["rows"]} if cost else {}
    return "\n".join(
        [
            "# Methods",
            "",
            *what_follows(neutral, cost),
            "`kvweave ask --recipe NAME` runs a recipe, `--prepare NAME` gives it chunks with another preparation, and `--ratio` or",
            "`--coverage` sets how much it recomputes. The [guide](../../docs/guide/recipes.md) helps to choose one. `lab/pages/build.py`",
            "writes this page from the recipes' docstrings and the results of `lab/experiments/`. The commands that repeat a table are",
            "folded below it.",
            "",
            "## Neutral tasks",
            "",
            "In these [tasks](evaluation.md#tasks) some sentences refer to an earlier one. How far such a sentence is from the start of its",
            "chunk is drawn at random, and so is the place of the sentence it refers to. The table has each recipe on its own preparation:",
            "",
            *by_task(neutral),
            *by_bytes(neutral),
            *(own_comparisons(neutral) if neutral else ()),
            "### Chunks against the order of the text",
            "",
            *against_the_text(permuted, neutral),
            "### Preparation × selector",
            "",
            *_matrices(neutral),
            "## Tasks that favour a placement",
            "",
            "In these tasks the sentence that refers back is the first of its chunk, and the sentence it refers to is in the chunk before.",
            "That favours recipes that repair the beginnings of chunks, and those that prepare a chunk after the one before it.",
            "",
            _EARLIER,
            "",
            *level_with_own(fixed),
            *_scores(fixed, [OVERALL]),
            *_image_lines(images),
            "## What selecting costs",
            "",
            *_costs(cost),
            "## Every method",
            "",
            *_dates(neutral, fixed),
            *(
                line
                for name, make in methods.items()
                for line in _method(name, make, (neutral, fixed), shares)
            ),
            *_NOT_HERE,
        ]
    )


_EARLIER = (
    "These scores are from a time when `weave` prepared a chunk only after the one before it, so `weave` here is nearly today's "
    "`following+weave`. The preparation `woven` then used ten similar chunks instead of five."
)

_NOT_HERE = (
    "## Known, and not built",
    "",
    "Two methods of 2026 do not store KV, or train vectors to store with it. These descriptions rest on short accounts, not on the papers.",
    "",
    "**SIFT** (arXiv 2606.09441) stores no KV. For each document it stores two bit vectors that mark the tokens with high attention. It"
    " claims a first token 1.71 times sooner, an accuracy within 1 %, and 24,000 times fewer bytes, and argues that reusing KV is slower"
    " where disks are slow. In kvweave it would need the vectors as a feature of each chunk, computed at indexing time, and an attention"
    " operator that skips the unmarked tokens. As no KV is stored, every row of a prompt is computed again. We do not know how the"
    " vectors are made, whether each layer and head has its own, on which models and lengths it was measured, and whether the code is"
    " public.",
    "",
    "**KV Packet** (April 2026; public code, MIT) recomputes nothing. It puts trained vectors, a header and a trailer, around the KV of each"
    " document; they take 0.4–6 % more storage and are trained for each model. In kvweave it would need that training in the lab, a"
    " preparation that stores the vectors with a chunk's KV, and a place for them between the chunks of a prompt. We do not know how its"
    " answers compare with those of the recipes above, and whether vectors trained on one kind of text serve another kind.",
    "",
)


def tasks_page(quality: Result | None) -> str:
    """Return the text of lab/docs/methods-by-task.md."""
    tasks = dict.fromkeys(row["task"] for row in quality["rows"]) if quality else []
    return "\n".join(
        [
            "# Methods, task by task",
            "",
            *what_follows_by_task(quality),
            "The mean over all tasks and the methods themselves are in [methods.md](methods.md).",
            "",
            _EARLIER,
            "",
            *_scores(quality, [task for task in tasks if task != OVERALL]),
        ]
    )


def _scores(quality: Result | None, tasks: Sequence[str]) -> list[str]:
    """Return a table of scores by recipe and ratio for each length and task; the mean over tasks has normalised scores too."""
    if quality is None:
        return [NOT_MEASURED, ""]
    lines = [
        f"On the shipped reference model, `{quality['split']}` split, chunks of up to {quality['chunk_tokens']} tokens, with 95 % intervals. "
        f"Tasks: {', '.join(f'`{task}`' for task in dict.fromkeys(row['task'] for row in quality['rows']) if task != OVERALL)}.",
        "",
        *folded(commands(quality), quality["date"]),
        "",
    ]
    rows = [row for row in quality["rows"] if on_own_preparation(row["recipe"])]
    for context_tokens in sorted({row["context_tokens"] for row in rows}):
        for task in tasks:
            here = [row for row in rows if (row["context_tokens"], row["task"]) == (context_tokens, task)]
            if not here:
                continue
            named = "mean over tasks" if task == OVERALL else f"`{task}`"
            measures = ["score", "normalised"] if task == OVERALL else ["score"]
            for measure in measures:
                title = f"{length_text(context_tokens)}, {named}, {measure}"
                lines += [f"### {title[0].upper()}{title[1:]}", "", *_by_ratio(here, measure), ""]
    return lines


def _by_ratio(rows: Sequence[Result], measure: str) -> list[str]:
    """Return a table with a line per recipe and a column per ratio, and a second one for budgets given as coverage."""
    ratios = sorted({row["ratio"] for row in rows if row["ratio"] is not None})
    cells = {(row["recipe"], row["ratio"]): row for row in rows}
    lines = header("recipe", *(f"{ratio:.0%}" for ratio in ratios))
    for recipe in dict.fromkeys(row["recipe"] for row in rows if row["ratio"] is not None):
        lines.append(
            table_row(f"`{recipe}`", *(estimate(cells.get((recipe, ratio)), measure) for ratio in ratios))
        )
    covered = [row for row in rows if row.get("coverage") is not None]
    if covered:
        lines += ["", *header("recipe", "coverage", measure, "context tokens computed")]
        for row in covered:
            cell = (f"{row['coverage']:g}", estimate(row, measure), f"{row['rows']:.0f}")
            lines.append(table_row(f"`{row['recipe']}`", *cell))
    return lines


def _image_lines(images: Iterable[str]) -> list[str]:
    shown = [name for name in sorted(images) if name.startswith("methods-")]
    return [line for name in shown for line in (f"![{_title(name)}](images/{name})", "")]


def _title(name: str) -> str:
    return name.removesuffix(".png").replace("-", " ")


def _matrices(quality: Result | None) -> list[str]:
    """Return the matrices of selectors and preparations, and how many selectors each preparation improves."""
    matrices = (quality or {}).get("matrices") or []
    if not matrices:
        return [NOT_MEASURED, ""]
    lines = []
    for matrix in matrices:
        cells = {(cell["selector"], cell["preparation"]): cell for cell in matrix["cells"]}
        lines += [
            f"{length_text(matrix['context_tokens'])}, ratio {matrix['ratio']:g}, mean over tasks: score, normalised score, and"
            " the difference from the same selector on isolated chunks, prompt by prompt, with 95 % intervals.",
            "",
            *header("selector", *(f"`{name}`" for name in matrix["preparations"])),
        ]
        for selector in matrix["selectors"]:
            found = (cells.get((selector, preparation)) for preparation in matrix["preparations"])
            lines.append(table_row(f"`{selector}`", *map(_cell, found)))
        lines += ["", *_gains(matrix), ""]
    return lines


def _cell(cell: Result | None) -> str:
    if cell is None:
        return NEVER
    parts = [estimate(cell, "score"), f"n {estimate(cell, 'normalised')}"]
    if cell["gain"] is not None:
        parts.append(estimate(cell, "gain", "+.3f"))
    return "<br>".join(parts)


def _gains(matrix: Result) -> list[str]:
    found = []
    for preparation in matrix["preparations"]:
        gains = [
            cell["gain_interval"]
            for cell in matrix["cells"]
            if cell["preparation"] == preparation and cell["gain_interval"] is not None
        ]
        if gains:
            better, worse = sum(low > 0 for low, _ in gains), sum(high < 0 for _, high in gains)
            counts = f"{better} of {len(gains)} selectors score higher, {worse} lower"
            if not better and not worse:
                counts = f"no significant change ({len(gains)} selector{'s' * (len(gains) > 1)})"
            found.append(f"- `{preparation}`: {counts}.")
    return found


def _costs(cost: Result | None) -> list[str]:
    if cost is None:
        return [NOT_MEASURED, ""]
    where = f"{cost['threads']} CPU threads" if cost["device"] == "cpu" else cost["device"]
    lines = [
        f"As a share of full prefill of {cost['prompt_tokens']:,} tokens ({cost['full_s']:.2f} s) in the shape of {cost['shape']} "
        f"({cost['dtype']}, random weights, {where}), chunks of {cost['chunk_tokens']} tokens, ratio {cost['ratio']:g}: median of "
        f"{cost['repeats']} interleaved repeats, and their range. The time to lay out stored KV is part of the time to the first token, not of the selection.",
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


def _dates(neutral: Result | None, fixed: Result | None) -> list[str]:
    """Return a note on the dates and tasks of the scores in the methods' sections."""
    if not neutral or not fixed:
        return []
    return [
        f"Under *Measured*, scores on the neutral tasks are from {neutral['date']}. Normalised scores are from the tasks that favour a placement, "
        f"{fixed['date']}. {_EARLIER}",
        "",
    ]


def _method(
    name: str,
    make: Callable[[], Recipe],
    quality: tuple[Result | None, Result | None],
    shares: Mapping[str, Result],
) -> list[str]:
    sections = headings(make)
    _, preparation = name_parts(name)
    lines = [f"### `{name}`", "", sections[""], ""]
    lines += [f"- **{heading}**: {sections[heading]}" for heading in HEADINGS]
    if preparation is not None:
        lines.append(f"- **Prepared**: `{preparation}`")
    neutral, fixed = quality
    measured = [*_neutral_scores(name, neutral), *_normalised_scores(name, fixed)]
    if name in shares:
        measured.append(f"selecting costs {_share(shares[name], 'select')} of full prefill")
    return [*lines, f"- **Measured**: {'; '.join(measured) or NOT_MEASURED.lower().rstrip('.')}.", ""]


def _neutral_scores(name: str, quality: Result | None) -> list[str]:
    """Return scores by ratio on the tasks that favour no placement."""
    rows = [
        row
        for row in (quality["rows"] if quality else [])
        if (row["task"], row["recipe"]) == (OVERALL, name) and row["ratio"] is not None
    ]
    return [f"neutral tasks {row['score']:.3f} at {row['ratio']:.0%}" for row in rows]


def _normalised_scores(name: str, quality: Result | None) -> list[str]:
    """Return normalised scores by ratio, length by length, on the tasks that favour a placement."""
    rows = [
        row
        for row in (quality["rows"] if quality else [])
        if (row["task"], row["recipe"]) == (OVERALL, name) and row["ratio"] is not None
    ]
    if quality is None:
        return []
    prepared = ", prepared nearly as `following+weave` is now" if name == "weave" else ""
    return [
        f"normalised {', '.join(_at(row) for row in rows if row['context_tokens'] == length)} "
        f"({length_text(length)}, {quality['date'].split(',')[0]}{prepared})"
        for length in dict.fromkeys(row["context_tokens"] for row in rows)
    ]


def _at(row: Result) -> str:
    value = NEVER if row["normalised"] is None else f"{row['normalised']:.2f}"
    return f"{value} at {row['ratio']:.0%}"
