"""lab/docs/methods.md and lab/docs/methods-by-task.md: every recipe's docstring and measurements.

Reads no files: `build.py` passes results, None for what did not run.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header
from markdown_parts import row as table_row
from methods_findings import on_own_preparation, own_verdicts, what_follows, what_follows_by_task

from kvweave.recipes.methods import name_parts
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.rows import OVERALL, length_text
from kvweave_lab.eval.tasks.mixed import PERMUTED

Methods = Mapping[str, Callable[[], Recipe]]

HEADINGS = ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations", "Measured")
_SEE_HERE = "see the methods page"
_NEVER = "–"


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
    """Return the page.

    `neutral` has the tasks that favour no placement, `permuted` the same with chunks against the order of the text, `fixed` three tasks by ratio that favour the beginnings of chunks.
    `images` are the names of files in lab/docs/images.
    """
    shares = {row["recipe"]: row for row in cost["rows"]} if cost else {}
    return "\n".join(
        [
            "# Methods",
            "",
            *what_follows(neutral, fixed, cost),
            "Every recipe by its name. `kvweave ask --recipe NAME` runs it, `--prepare NAME` gives it chunks with another preparation,",
            "`--ratio` or `--coverage` sets how much it recomputes. `lab/pages/build.py` writes this page from the recipes' docstrings",
            "and the results of `lab/experiments/`. Which recipe to take: [recipes](../../docs/guide/recipes.md).",
            "The commands that repeat a table are folded beside it.",
            "",
            "## Neutral tasks",
            "",
            "The distance between a cut and the sentence that refers back is drawn, and so is the place of what it refers to; see",
            "[the tasks](evaluation.md#tasks). Each recipe on its own preparation:",
            "",
            *_by_task(neutral),
            *_by_bytes(neutral),
            *_verdicts_of_own(neutral),
            "### Chunks against the order of the text",
            "",
            *_permuted(permuted, neutral),
            "### Preparation × selector",
            "",
            *_matrices(neutral),
            "## Tasks that favour a placement",
            "",
            "In these the sentence that refers back starts the chunk behind the one it refers to. That favours recipes that repair the",
            "beginnings of chunks, and those that prepare a chunk behind the one before it.",
            "",
            _EARLIER,
            "",
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
    "Measured when `weave` prepared chunks after the one before alone: `weave` here is nearly today's `following+weave`. "
    "`woven` was after ten similar chunks then, not five."
)

_NOT_HERE = (
    "## Known, and not built",
    "",
    "Two methods of 2026 store something else than KV, or train for it. Both are described from short accounts, not from their papers.",
    "",
    "**SIFT** (arXiv 2606.09441) stores no KV. Two bit vectors of each document say where attention is high. It claims a first token 1.71"
    " times sooner within 1 % of the accuracy and 24,000 times fewer bytes, and argues that reusing KV loses where disks are slow. Here it"
    " would need the vectors as a feature of each chunk, made at indexing time, and an attention operator that skips what they leave out. As"
    " no KV is stored, every row of a prompt is computed again. Not known here: how the vectors are made, whether layers and heads have their"
    " own, on which models and lengths it was measured, and whether code is public.",
    "",
    "**KV Packet** (April 2026; public code, MIT) recomputes nothing. Trained vectors, a header and a trailer, stand around the KV of each"
    " document and take 0.4–6 % more storage. They are trained for each model. Here they would need that training in the lab, a preparation"
    " of its own that stores them beside a chunk's KV, and a place for them between the chunks of a prompt. Not known here: the quality of"
    " its answers beside the recipes above, and how far vectors trained on one kind of text serve another.",
    "",
)


_PERMUTED_FINDING = ("",)


def tasks_page(quality: Result | None) -> str:
    """Return the page with the same scores task by task."""
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


def _by_task(quality: Result | None) -> list[str]:
    """Return a line per recipe, a column per task; tasks that reuse solves show that nothing breaks them."""
    if quality is None:
        return [NOT_MEASURED, ""]
    rows = [row for row in quality["rows"] if on_own_preparation(row["recipe"]) and row["ratio"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    costs = _costs_of(quality)
    lines = []
    for length in sorted({row["context_tokens"] for row in rows}):
        cells = {
            (row["recipe"], row["ratio"], row["task"]): row for row in rows if row["context_tokens"] == length
        }
        lines += [
            f"{length_text(length)}, `{quality['split']}` split, {quality['rows'][0]['samples']} prompts of each task; score.",
            "",
            *header(
                *("recipe", "ratio"),
                *(f"`{task}`" if task != OVERALL else "mean" for task in tasks),
                *(("bytes/token", "passes") if costs else ()),
            ),
        ]
        if costs:
            lines.append(_without_context(quality, tasks))
        for recipe, ratio in dict.fromkeys((recipe, ratio) for recipe, ratio, _ in cells):
            found = [cells.get((recipe, ratio, task)) for task in tasks]
            scores = (_NEVER if one is None else f"{one['score']:.3f}" for one in found[:-1])
            cost = _cost(costs.get(recipe)) if costs else ()
            lines.append(
                table_row(f"`{recipe}`", f"{ratio:.0%}", *scores, _estimate(found[-1], "score"), *cost)
            )
        lines.append("")
    return [*lines, *folded(_commands(quality), quality["date"]), ""]


def _without_context(quality: Result, tasks: Sequence[str]) -> str:
    """Return the line of what the model answers without any chunk; the last column of scores is the mean."""
    scores = quality["completed"]["without_context"]
    mean = sum(scores.values()) / len(scores)
    return table_row("no context", "–", *(f"{scores.get(task, mean):.3f}" for task in tasks), _NEVER, _NEVER)


def _permuted(permuted: Result | None, neutral: Result | None) -> list[str]:
    """Return scores where the chunk that refers back stands first, beside those of the same prompts in the text's order."""
    if permuted is None or neutral is None:
        return [NOT_MEASURED, ""]
    tasks = list(dict.fromkeys(row["task"] for row in permuted["rows"] if row["task"] != OVERALL))
    own = {(row["recipe"], row["ratio"], row["task"]): row for row in permuted["rows"]}
    ordered = {(row["recipe"], row["ratio"], row["task"]): row for row in neutral["rows"]}
    against = {(row["recipe"], row["ratio"]): row for row in permuted["against"]}
    alone = permuted["completed"]["without_context"]
    costs = _costs_of(permuted)
    prompts, there = own["full", 1.0, OVERALL]["samples"], against["full", 1.0]
    lines = [
        f"The same {prompts} prompts of {len(tasks)} tasks with their chunks in a drawn order, in which the chunk that refers back stands before the one"
        f" that it refers to, with whatever lies between. In {prompts - there['samples']} of them one of the two was not retrieved; the {there['samples']} others"
        " have a column of their own. *In the order of the text* is the mean of the same prompts in the table above.",
        "",
        *header(
            *("recipe", "ratio"),
            *(f"`{task}`" for task in tasks),
            *("mean", "in the order of the text", "both chunks there", "bytes/token", "passes"),
        ),
        table_row(
            *("no context", "–"),
            *(f"{alone[task]:.3f}" for task in tasks),
            f"{sum(alone.values()) / len(alone):.3f}",
            *(_NEVER,) * 4,
        ),
    ]
    for recipe, ratio in against:
        scores = (own[recipe, ratio, task] for task in tasks)
        before = [ordered.get((recipe, ratio, PERMUTED[task])) for task in tasks]
        known = [row["score"] for row in before if row is not None]
        lines.append(
            table_row(
                *(f"`{recipe}`", f"{ratio:.0%}"),
                *(f"{row['score']:.3f}" for row in scores),
                _estimate(own[recipe, ratio, OVERALL], "score"),
                f"{sum(known) / len(known):.3f}" if len(known) == len(tasks) else _NEVER,
                _estimate(against[recipe, ratio], "score"),
                *_cost(costs.get(recipe)),
            )
        )
    return [*lines, "", *_PERMUTED_FINDING, *folded(_commands(permuted), permuted["date"]), ""]


def _costs_of(quality: Result) -> dict[str, Result]:
    return {one["recipe"]: one for one in quality.get("costs", ())}


def _cost(one: Result | None) -> tuple[str, str]:
    return (_NEVER, _NEVER) if one is None else (f"{one['bytes_per_token']:,.0f}", f"{one['passes']:.2f}")


def _by_bytes(quality: Result | None) -> list[str]:
    """Return every recipe on every preparation by what it stores and runs ahead, and what our own gains over it."""
    costs = _costs_of(quality) if quality else {}
    if quality is None or not costs:
        return [NOT_MEASURED, ""]
    lines = []
    for length in sorted({one["context_tokens"] for one in quality["beside_own"]}):
        rows = [row for row in quality["rows"] if (row["task"], row["context_tokens"]) == (OVERALL, length)]
        gains = {
            (one["recipe"], one["ratio"]): one
            for one in quality["beside_own"]
            if one["context_tokens"] == length
        }
        prepared = [row for row in rows if row["recipe"] in costs and row["ratio"] is not None]
        lines += [
            f"{length_text(length)}, every recipe on every preparation, those that store least first: the mean over tasks, and the score of"
            " `weave` minus it at the same ratio, prompt by prompt. `isolated` and `similar` chunks do not know the chunk before them.",
            "",
            *header("recipe", "ratio", "bytes/token", "passes", "mean", "`weave` minus it"),
        ]
        for row in sorted(prepared, key=lambda row: _spent(costs[row["recipe"]])):
            gain = _estimate(gains.get((row["recipe"], row["ratio"])), "gain", "+.3f")
            cells = (f"{row['ratio']:.0%}", *_cost(costs[row["recipe"]]), _estimate(row, "score"), gain)
            lines.append(table_row(f"`{row['recipe']}`", *cells))
        lines.append("")
    about = quality["completed"]
    return [
        *lines,
        "Bytes of KV and features, and tokens through the model, per token of a chunk, counted while a recipe prepares the "
        f"{about['chunks']} chunks of the first prompts of these tasks in an empty store; a second model is not counted. Most of these chunks "
        "begin a document, so `following` costs little here.",
        "",
    ]


def _spent(cost: Result) -> tuple[int, float]:
    """Return what sorts recipes: stored bytes, then passes."""
    return round(cost["bytes_per_token"] / 100), cost["passes"]


def _verdicts_of_own(quality: Result | None) -> list[str]:
    return own_verdicts(quality) if quality else []


def _commands(quality: Result) -> list[str]:
    after = [quality["completed"]["command"]] if "completed" in quality else []
    return [*quality["evaluations"], quality["command"], *after]


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


def _dates(neutral: Result | None, fixed: Result | None) -> list[str]:
    """Return of when and of which tasks the scores of the methods are."""
    if not neutral or not fixed:
        return []
    return [
        f"*Measured* below: scores on the neutral tasks are of {neutral['date']}; normalised ones are of the tasks that favour a placement, "
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
    lines += [f"- **{heading}**: {sections[heading]}" for heading in HEADINGS[:-1]]
    if preparation is not None:
        lines.append(f"- **Prepared**: `{preparation}`")
    neutral, fixed = quality
    measured = [*_neutral_scores(name, neutral), *_normalised_scores(name, fixed)]
    if name in shares:
        measured.append(f"selecting costs {_share(shares[name], 'select')} of full prefill")
    elsewhere = sections["Measured"].removeprefix(_SEE_HERE).strip("; .")
    measured += [elsewhere] if elsewhere else []
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
    value = _NEVER if row["normalised"] is None else f"{row['normalised']:.2f}"
    return f"{value} at {row['ratio']:.0%}"


def _estimate(row: Result | None, measure: str, form: str = ".3f") -> str:
    if row is None or row[measure] is None:
        return _NEVER
    low, high = row[f"{measure}_interval"]
    return f"{row[measure]:{form}} ({low:{form}}–{high:{form}})"
