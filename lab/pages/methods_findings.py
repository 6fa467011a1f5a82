"""What the tables of lab/docs/methods.md and lab/docs/methods-by-task.md come to, in sentences."""

from collections.abc import Iterable, Sequence

from markdown_parts import Result

from kvweave_lab.eval.natural.rows import SAME_BYTES
from kvweave_lab.eval.rows import OVERALL, length_text

_NEAR = 0.01
"""How far below full attention a score may be and still count as equal."""
_COMPARED_FROM = 0.15
"""The ratio from which recipes are compared with our own for a lead that is lost."""


def what_follows(neutral: Result | None, fixed: Result | None, cost: Result | None) -> list[str]:
    """Return what the tables below come to, the tasks without a favoured placement first; nothing for what was not measured."""
    lines = [*_mean_scores(neutral), *_best_preparation(neutral)]
    if neutral:
        lines += [verdict.removeprefix("- ") for verdict in own_verdicts(neutral) if verdict]
    lines += _level_with_own(fixed)
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


def what_follows_by_task(quality: Result | None) -> list[str]:
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
        f"Mean score over {tasks} tasks that favour no placement, {length_text(means['full', 1]['context_tokens'])}: full attention {means['full', 1]['score']:.3f}, "
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
                f"The preparation alone does a part of the work: plain reuse scores {best['score']:.3f} on "
                f"`{best['preparation']}` chunks and {plain[0]['score']:.3f} on isolated ones (mean over {listed(_matrix_tasks(quality))}). "
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
    cells = [one for one in cells if on_own_preparation(one["recipe"])]
    for ratio in sorted({one["ratio"] for one in cells}):
        level = [one for one in cells if one["ratio"] == ratio and one["gain_interval"][0] <= 0]
        if len(level) > 1 and ratio >= _COMPARED_FROM:
            names = listed(_names(level))
            return [
                f"On tasks that favour a placement, `weave` has no lead over {names} at {ratio:.0%}: the mean over {listed(_matrix_tasks(quality))}."
            ]
    return []


def own_verdicts(quality: Result) -> list[str]:
    """Return, ratio by ratio, how many others our own beats, which beat it, and which are level.

    Of all others, and of those that prepare chunks as it does or store as many bytes.
    """
    lines = []
    cells = [one for one in quality["beside_own"] if one["ratio"] is not None]
    stored = {one["recipe"]: one["bytes_per_token"] for one in quality.get("costs", ())}
    own = stored.get("weave")
    for length, ratio in sorted({(one["context_tokens"], one["ratio"]) for one in cells}):
        here = [one for one in cells if (one["context_tokens"], one["ratio"]) == (length, ratio)]
        where = f"{length_text(length)}, {ratio:.0%}"
        lines.append(_verdict(where, here))
        if own:
            same = [one for one in here if one["recipe"].startswith("woven+")]
            lines.append(_verdict(f"{where}, at equal preparation", same))
            same = [one for one in here if _equal(stored.get(one["recipe"]), own)]
            lines.append(_verdict(f"{where}, at equal stored bytes", same))
    return [*lines, ""] if lines else []


def _equal(one: float | None, other: float) -> bool:
    """Return whether two recipes store equally many bytes, as on natural text."""
    return one is not None and max(one, other) <= SAME_BYTES * min(one, other)


def _verdict(where: str, cells: Sequence[Result]) -> str:
    better = [one for one in cells if one["gain_interval"][0] > 0]
    worse = [one for one in cells if one["gain_interval"][1] < 0]
    level = _names(one for one in cells if one not in better and one not in worse)
    text = f"{where}: `weave` scores higher than {len(better)} of {len(cells)} others"
    if worse:
        text += f", lower than {', '.join(_names(worse))}"
    if level:
        text += f"; the interval holds 0 for {', '.join(level)}"
    return f"- {text}."


def _matrix_tasks(quality: Result | None) -> list[str]:
    rows = quality["rows"] if quality else []
    return [f"`{task}`" for task in dict.fromkeys(row["task"] for row in rows) if task != OVERALL]


def on_own_preparation(recipe: str) -> bool:
    """Return whether a row is about a method on its own preparation; the others are in the matrix."""
    return "+" not in recipe


def _names(cells: Iterable[Result]) -> list[str]:
    return [f"`{one['recipe']}`" for one in cells]


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
