"""lab/docs/methods.md and lab/docs/methods-by-task.md: every recipe's docstring and measurements.

Reads no files: `build.py` passes results, None for what did not run.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header
from markdown_parts import row as table_row

from kvweave.recipes.methods import name_parts
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.rows import OVERALL, length_text

Methods = Mapping[str, Callable[[], Recipe]]

HEADINGS = ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations", "Measured")
_SEE_HERE = "see the methods page"
_NEVER = "–"
_NEAR = 0.01
"""How far below full attention a score may be and still count as equal."""
_COMPARED_FROM = 0.15
"""The ratio from which recipes are compared with our own for a lead that is lost."""


def headings(make: Callable[[], Recipe]) -> dict[str, str]:
    """Return a method's docstring by its fixed headings, each on one line; the first sentence has an empty heading."""
    text = inspect.getdoc(make) or ""
    found = re.findall(
        rf"^({'|'.join(HEADINGS)}): (.*?)(?=\n(?:{'|'.join(HEADINGS)}): |\Z)", text, re.M | re.S
    )
    return {"": text.split("\n")[0]} | {name: " ".join(section.split()) for name, section in found}


def methods_page(
    methods: Methods,
    quality: Result | None,
    every_task: Result | None,
    nearest: Result | None,
    cost: Result | None,
    images: Iterable[str],
) -> str:
    """Return the page.

    `every_task` has all tasks at a few ratios, `nearest` the recipes that came nearest to our own on other prompts.
    `images` are the names of files in lab/docs/images.
    """
    shares = {row["recipe"]: row for row in cost["rows"]} if cost else {}
    return "\n".join(
        [
            "# Methods",
            "",
            *_what_follows(quality, every_task, cost),
            "Every recipe by its name. `kvweave ask --recipe NAME` runs it, `--prepare NAME` gives it chunks with another preparation,",
            "`--ratio` or `--coverage` sets how much it recomputes. `lab/pages/build.py` writes this page from the recipes' docstrings",
            "and the results of `lab/experiments/`. Which recipe to take: [recipes](../../docs/guide/recipes.md).",
            "The commands that repeat a table are folded beside it.",
            "",
            "## Scores",
            "",
            *_scores(quality, [OVERALL]),
            *_image_lines(images),
            "## All tasks",
            "",
            *_every_task(every_task),
            *_nearest(nearest),
            "## Our own beside the others",
            "",
            *_own_gains(quality),
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
    """Return the page with the same scores task by task."""
    tasks = dict.fromkeys(row["task"] for row in quality["rows"]) if quality else []
    return "\n".join(
        [
            "# Methods, task by task",
            "",
            *_what_follows_by_task(quality),
            "The mean over all tasks and the methods themselves are in [methods.md](methods.md).",
            "",
            *_scores(quality, [task for task in tasks if task != OVERALL]),
        ]
    )


def _what_follows(quality: Result | None, every_task: Result | None, cost: Result | None) -> list[str]:
    """Return what the tables below come to; nothing for a table that was not measured."""
    lines = [*_mean_scores(every_task), *_best_preparation(quality)]
    if every_task:
        lines += [
            f"All tasks, {verdict.removeprefix('- ')}" for verdict in _own_verdicts(every_task) if verdict
        ]
    lines += _level_with_own(quality)
    own = next((row for row in cost["rows"] if row["recipe"] == "weave"), None) if cost else None
    if cost and own:
        lines.append(
            f"`weave` takes {own['ttft_over_full']:.1%} of full prefill's time until the first token at ratio {cost['ratio']:g}, of which "
            f"{own['select_over_full']:.1%} for selecting: {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']}, random weights."
        )
    if not lines:
        return []
    lines.append(
        "The scores are those of a 10 MB model on generated prompts. They do not show how recipes rank on a large model, on natural "
        "text or on longer contexts. A date says where the model had earlier weights: compare recipes within one table."
    )
    return ["What follows:", "", *(f"- {line}" for line in lines), ""]


def _mean_scores(quality: Result | None) -> list[str]:
    """Return the mean over all tasks of full attention, plain reuse and our own, and the best other at the smallest ratio."""
    if quality is None:
        return []
    means = {(row["recipe"], row["ratio"]): row for row in quality["rows"] if row["task"] == OVERALL}
    ratios = sorted(ratio for name, ratio in means if name == "weave" and ratio is not None)
    if not ratios or ("full", 1) not in means or ("reuse", 0) not in means:
        return []
    least = ratios[0]
    others = [row for (name, ratio), row in means.items() if ratio == least and name != "weave"]
    tasks = len({row["task"] for row in quality["rows"]} - {OVERALL})
    text = (
        f"Mean score over {tasks} tasks, {length_text(means['full', 1]['context_tokens'])}: full attention {means['full', 1]['score']:.3f}, "
        f"plain reuse {means['reuse', 0]['score']:.3f}, "
        + ", ".join(f"`weave` {means['weave', ratio]['score']:.3f} at {ratio:.0%}" for ratio in ratios)
    )
    if others:
        best = max(others, key=lambda row: float(row["score"]))
        text += f". The best other recipe at {least:.0%} is `{best['recipe']}` with {best['score']:.3f}"
    return [f"{text}."]


def _best_preparation(quality: Result | None) -> list[str]:
    """Return what plain reuse gains by a preparation, on the tasks that depend on it."""
    lines = []
    for matrix in ((quality or {}).get("matrices") or [])[:1]:
        cells = [cell for cell in matrix["cells"] if cell["selector"] == "reuse" and cell["gain"] is not None]
        plain = [
            cell
            for cell in matrix["cells"]
            if (cell["selector"], cell["preparation"]) == ("reuse", "isolated")
        ]
        if cells and plain:
            best = max(cells, key=lambda cell: float(cell["score"]))
            lines.append(
                f"Where a task cuts a text, the preparation alone does much of the work: plain reuse scores {best['score']:.3f} on "
                f"`{best['preparation']}` chunks and {plain[0]['score']:.3f} on isolated ones (mean over {_listed(_matrix_tasks(quality))}). "
                f"At ratio {matrix['ratio']:g}, all selectors score {_score_range(matrix, best['preparation'])} on `{best['preparation']}` chunks and "
                f"{_score_range(matrix, 'isolated')} on isolated ones."
            )
    return lines


def _score_range(matrix: Result, preparation: str) -> str:
    scores = [cell["score"] for cell in matrix["cells"] if cell["preparation"] == preparation]
    return f"{min(scores):.3f} to {max(scores):.3f}"


def _level_with_own(quality: Result | None) -> list[str]:
    """Return the recipes on their own preparation that our own does not beat from a ratio of `_COMPARED_FROM` on."""
    cells = [one for one in (quality or {}).get("beside_own", ()) if one["ratio"] is not None]
    cells = [one for one in cells if _on_own_preparation(one["recipe"])]
    for ratio in sorted({one["ratio"] for one in cells}):
        level = [one for one in cells if one["ratio"] == ratio and one["gain_interval"][0] <= 0]
        if len(level) > 1 and ratio >= _COMPARED_FROM:
            names = _listed(_names(level))
            return [
                f"At {ratio:.0%}, `weave` has no lead over {names} on average over {_listed(_matrix_tasks(quality))}."
            ]
    return []


def _matrix_tasks(quality: Result | None) -> list[str]:
    rows = quality["rows"] if quality else []
    return [f"`{task}`" for task in dict.fromkeys(row["task"] for row in rows) if task != OVERALL]


def _what_follows_by_task(quality: Result | None) -> list[str]:
    """Return, task by task, full attention, plain reuse and the smallest ratio at which `weave` is within 0.01 of full."""
    if quality is None:
        return []
    lines = []
    for task in dict.fromkeys(row["task"] for row in quality["rows"] if row["task"] != OVERALL):
        own = {(row["recipe"], row["ratio"]): row["score"] for row in quality["rows"] if row["task"] == task}
        full, reuse = own.get(("full", 1.0)), own.get(("reuse", 0.0))
        ratios = sorted(ratio for name, ratio in own if name == "weave" and ratio is not None)
        if full is None or reuse is None or not ratios:
            continue
        near = [ratio for ratio in ratios if own["weave", ratio] >= full - _NEAR]
        text = f"`{task}`: full attention {full:.3f}, plain reuse {reuse:.3f}, `weave` {own['weave', ratios[0]]:.3f} at {ratios[0]:.0%}"
        if near and near[0] != ratios[0]:
            text += f"; within {_NEAR:g} of full attention from {near[0]:.0%}"
        lines.append(f"- {text}.")
    note = "- 200 prompts of a 10 MB model per task: differences below the intervals mean nothing."
    return ["What follows:", "", *lines, note, ""] if lines else []


def _scores(quality: Result | None, tasks: Sequence[str]) -> list[str]:
    """Return scores by recipe and ratio, length by length and task by task; normalised ones for the mean over tasks."""
    if quality is None:
        return [NOT_MEASURED, ""]
    lines = [
        f"On the shipped reference model, `{quality['split']}` split, chunks of up to {quality['chunk_tokens']} tokens, with 95 % intervals. "
        f"Tasks: {', '.join(f'`{task}`' for task in dict.fromkeys(row['task'] for row in quality['rows']) if task != OVERALL)}.",
        "",
        *folded(_commands(quality), quality["date"]),
        "",
    ]
    rows = [row for row in quality["rows"] if _on_own_preparation(row["recipe"])]
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


def _on_own_preparation(recipe: str) -> bool:
    """Return whether a row is about a method on its own preparation; the others are in the matrix."""
    return "+" not in recipe


def _by_ratio(rows: Sequence[Result], measure: str) -> list[str]:
    """Return a line per recipe, a column per ratio; coverages have a table of their own, with the tokens computed."""
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
    """Return a line per recipe, a column per task; tasks that reuse solves show that nothing breaks them."""
    if quality is None:
        return [NOT_MEASURED, ""]
    rows = [row for row in quality["rows"] if _on_own_preparation(row["recipe"]) and row["ratio"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for length in sorted({row["context_tokens"] for row in rows}):
        cells = {
            (row["recipe"], row["ratio"], row["task"]): row for row in rows if row["context_tokens"] == length
        }
        lines += [
            f"{length_text(length)}, `{quality['split']}` split, {quality['rows'][0]['samples']} prompts of each task; score.",
            "",
            *header("recipe", "ratio", *(f"`{task}`" if task != OVERALL else "mean" for task in tasks)),
        ]
        for recipe, ratio in dict.fromkeys((recipe, ratio) for recipe, ratio, _ in cells):
            found = [cells.get((recipe, ratio, task)) for task in tasks]
            scores = (_NEVER if one is None else f"{one['score']:.3f}" for one in found[:-1])
            lines.append(table_row(f"`{recipe}`", f"{ratio:.0%}", *scores, _estimate(found[-1], "score")))
        lines.append("")
    return [*lines, *_own_verdicts(quality), *folded(_commands(quality), quality["date"]), ""]


def _nearest(quality: Result | None) -> list[str]:
    """Return the same comparison on other prompts, more of them where recipes differ."""
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
        "Two recipes that come near `weave` ran again with it, on prompts of other seeds, with more of the tasks on which recipes differ:",
        f"{prompts}. The table counts these prompts alone, with equal weight per task.",
        "",
        *_own_gains(quality),
        *folded(_commands(quality), quality["date"]),
        "",
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _own_gains(quality: Result | None) -> list[str]:
    """Return what our own recipe gains over every other, by ratio."""
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
            f"{length_text(length)}: the score of `weave` minus the other's at the same ratio, mean over tasks, prompt by prompt.",
            "",
            *header("recipe", *(f"{ratio:.0%}" for ratio in ratios)),
        ]
        for recipe in dict.fromkeys(one["recipe"] for one in here if _on_own_preparation(one["recipe"])):
            found = (cells.get((recipe, ratio)) for ratio in ratios)
            lines.append(table_row(f"`{recipe}`", *(_estimate(one, "gain", "+.3f") for one in found)))
        lines.append("")
    return [*lines, *_own_verdicts(quality)]


def _own_verdicts(quality: Result) -> list[str]:
    """Return, ratio by ratio, how many others our own beats, which beat it, and which are level."""
    lines = []
    cells = [one for one in quality["beside_own"] if one["ratio"] is not None]
    for length, ratio in sorted({(one["context_tokens"], one["ratio"]) for one in cells}):
        here = [one for one in cells if (one["context_tokens"], one["ratio"]) == (length, ratio)]
        better = [one for one in here if one["gain_interval"][0] > 0]
        worse = [one for one in here if one["gain_interval"][1] < 0]
        level = _names(one for one in here if one not in better and one not in worse)
        text = f"{length_text(length)}, {ratio:.0%}: `weave` scores higher than {len(better)} of {len(here)} others"
        if worse:
            text += f", lower than {', '.join(_names(worse))}"
        if level:
            text += f"; the interval holds 0 for {', '.join(level)}"
        lines.append(f"- {text}.")
    return [*lines, ""] if lines else []


def _names(cells: Iterable[Result]) -> list[str]:
    return [f"`{one['recipe']}`" for one in cells]


def _commands(quality: Result) -> list[str]:
    return [*quality["evaluations"], quality["command"]]


def _image_lines(images: Iterable[str]) -> list[str]:
    shown = [name for name in sorted(images) if name.startswith("methods-")]
    return [line for name in shown for line in (f"![{_title(name)}](images/{name})", "")]


def _title(name: str) -> str:
    return name.removesuffix(".png").replace("-", " ")


def _matrices(quality: Result | None) -> list[str]:
    """Return score, normalised score and gain per cell; per preparation, how many selectors it lifts."""
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
        lines += ["", *(f"- {verdict}" for verdict in _verdicts(matrix)), ""]
    return lines


def _cell(cell: Result | None) -> str:
    if cell is None:
        return _NEVER
    parts = [_estimate(cell, "score"), f"n {_estimate(cell, 'normalised')}"]
    if cell["gain"] is not None:
        parts.append(_estimate(cell, "gain", "+.3f"))
    return "<br>".join(parts)


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
        f"{cost['repeats']} interleaved repeats, and their range. Laying out stored KV counts for the whole, not for the selection.",
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
    sections = headings(make)
    _, preparation = name_parts(name)
    lines = [f"### `{name}`", "", sections[""], ""]
    lines += [f"- **{heading}**: {sections[heading]}" for heading in HEADINGS[:-1]]
    if preparation is not None:
        lines.append(f"- **Prepared**: `{preparation}`")
    measured = _normalised_scores(name, quality)
    if name in shares:
        measured.append(f"selecting costs {_share(shares[name], 'select')} of full prefill")
    elsewhere = sections["Measured"].removeprefix(_SEE_HERE).strip("; .")
    measured += [elsewhere] if elsewhere else []
    return [*lines, f"- **Measured**: {'; '.join(measured) or NOT_MEASURED.lower().rstrip('.')}.", ""]


def _normalised_scores(name: str, quality: Result | None) -> list[str]:
    """Return normalised scores by ratio, length by length."""
    rows = [
        row
        for row in (quality["rows"] if quality else [])
        if (row["task"], row["recipe"]) == (OVERALL, name) and row["ratio"] is not None
    ]
    return [
        f"normalised {', '.join(_at(row) for row in rows if row['context_tokens'] == length)} ({length_text(length)})"
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
