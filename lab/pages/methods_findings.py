"""Summaries of the tables of lab/docs/methods.md and lab/docs/methods-by-task.md."""

from collections.abc import Iterable, Iterator, Sequence

from markdown_parts import Result, table

from kvweave_lab.eval.natural.rows import SAME_BYTES
from kvweave_lab.eval.rows import OVERALL, length_text

_NEAR = 0.01
"""How far below full attention a score may be and still count as equal."""
_COMPARED_FROM = 0.15
"""The smallest ratio at which `level_with_own` looks for recipes that match `weave`."""


def what_follows(neutral: Result | None, cost: Result | None) -> list[str]:
    """Return the summary table of the tasks that favour no placement, and its conditions; nothing before they are measured."""
    if neutral is None:
        return []
    lines = [*_mean_scores(neutral), *_best_preparation(neutral), *_counts(neutral)]
    own = next((row for row in cost["rows"] if row["recipe"] == "weave"), None) if cost else None
    if cost and own:
        share = f"{own['ttft_over_full']:.1%}, of which {own['select_over_full']:.1%} select tokens"
        lines.append((f"time to the first token, of full prefill's, `weave` at {cost['ratio']:.0%}", share))
    if not lines:
        return []
    length = length_text(neutral["rows"][0]["context_tokens"])
    where = f"; time: {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']}, random weights" if cost and own else ""  # fmt: skip
    return [
        *table(("measure", "result"), lines),
        "",
        f"Scores are means over {listed(_tasks(neutral))}, {length}{where}. Counts compare `weave` with each other recipe prompt by prompt: "
        "the other one is worse or better where the 95 % interval of the difference leaves out 0.",
        "",
        "These are scores of a 10 MB model on generated prompts. They do not show how recipes rank on a large model, on [natural text](natural.md) "
        "or on longer contexts. A date says where the model had earlier weights: compare recipes within one table only.",
        "",
    ]


def what_follows_by_task(quality: Result | None) -> list[str]:
    """Return for each task the scores of full attention, plain reuse and `weave`, and the smallest ratio at which `weave` comes near full."""
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
    note = "There are 200 prompts per task, answered by a 10 MB model. A difference that is smaller than its interval means nothing."
    return [*lines, "", note, ""] if lines else []


def _mean_scores(quality: Result) -> list[tuple[str, str]]:
    """Return the mean scores of full attention, plain reuse and `weave`, and of the best other recipe at the smallest ratio."""
    means = {(row["recipe"], row["ratio"]): row for row in quality["rows"] if row["task"] == OVERALL}
    ratios = sorted(ratio for name, ratio in means if name == "weave" and ratio is not None)
    if not ratios or ("full", 1) not in means or ("reuse", 0) not in means:
        return []
    shown = [("full", 1), ("reuse", 0), *(("weave", ratio) for ratio in ratios)]
    titles = {"full": "full attention", "reuse": "plain reuse"}
    lines = [
        (f"score, {titles.get(name, f'`{name}` at {ratio:.0%}')}", f"{means[name, ratio]['score']:.3f}")
        for name, ratio in shown
    ]
    others = [row for (name, ratio), row in means.items() if ratio == ratios[0] and name != "weave"]
    if others:
        best = max(others, key=lambda row: float(row["score"]))
        lines.append(
            (f"score, best other recipe at {ratios[0]:.0%}", f"{best['score']:.3f} (`{best['recipe']}`)")
        )
    return lines


def _best_preparation(quality: Result) -> list[tuple[str, str]]:
    """Return the score of plain reuse on its best preparation, and the range of all selectors there and on isolated chunks."""
    for matrix in (quality.get("matrices") or [])[:1]:
        cells = [cell for cell in matrix["cells"] if cell["selector"] == "reuse" and cell["gain"] is not None]
        if cells:
            best = max(cells, key=lambda cell: float(cell["score"]))
            name = best["preparation"]
            return [
                (f"score, plain reuse of `{name}` chunks", f"{best['score']:.3f}"),
                *(
                    (
                        f"score, all selectors on `{one}` chunks, {matrix['ratio']:.0%}",
                        _score_range(matrix, one),
                    )
                    for one in (name, "isolated")
                ),
            ]
    return []


def _counts(quality: Result) -> list[tuple[str, str]]:
    """Return how many recipes are worse, level and better than `weave`, by ratio and comparison."""
    return [
        (
            f"others worse / level / better than `weave`, {where}",
            " / ".join(str(len(cells)) for cells in each),
        )
        for _, where, each in _comparisons(quality)
    ]


def _score_range(matrix: Result, preparation: str) -> str:
    scores = [cell["score"] for cell in matrix["cells"] if cell["preparation"] == preparation]
    return f"{min(scores):.3f} to {max(scores):.3f}"


def level_with_own(quality: Result | None) -> list[str]:
    """Return a sentence on the smallest ratio from `_COMPARED_FROM` on at which several recipes match `weave`."""
    cells = [one for one in (quality or {}).get("beside_own", ()) if one["ratio"] is not None]
    cells = [one for one in cells if on_own_preparation(one["recipe"])]
    for ratio in sorted({one["ratio"] for one in cells}):
        level = [one for one in cells if one["ratio"] == ratio and one["gain_interval"][0] <= 0]
        if quality and len(level) > 1 and ratio >= _COMPARED_FROM:
            return [
                f"At {ratio:.0%} `weave` has no lead over {listed(_names(level))} (mean over {listed(_tasks(quality))}).",
                "",
            ]
    return []


def own_comparisons(quality: Result) -> list[str]:
    """Return a sentence for each ratio and comparison with the recipes that score worse, better or level."""
    lines = [_sentence(f"{length}, {where}", *cells) for length, where, cells in _comparisons(quality)]
    return [*lines, ""] if lines else []


_Cells = tuple[Sequence[Result], Sequence[Result], Sequence[Result]]
"""The recipes that are worse than `weave`, level with it, and better."""


def _comparisons(quality: Result) -> Iterator[tuple[str, str, _Cells]]:
    """Yield the length, the kind and the result of each comparison of `weave`: with all recipes, at equal preparation, and at equal stored bytes."""
    cells = [one for one in quality["beside_own"] if one["ratio"] is not None]
    stored = {one["recipe"]: one["bytes_per_token"] for one in quality.get("costs", ())}
    own = stored.get("weave")
    for length, ratio in sorted({(one["context_tokens"], one["ratio"]) for one in cells}):
        here = [one for one in cells if (one["context_tokens"], one["ratio"]) == (length, ratio)]
        tokens = length_text(length)
        yield tokens, f"{ratio:.0%}", _sorted_out(here)
        if own:
            same = [one for one in here if one["recipe"].startswith("woven+")]
            yield tokens, f"{ratio:.0%}, at equal preparation", _sorted_out(same)
            same = [one for one in here if _equal(stored.get(one["recipe"]), own)]
            yield tokens, f"{ratio:.0%}, at equal stored bytes", _sorted_out(same)


def _sorted_out(cells: Sequence[Result]) -> _Cells:
    worse = [one for one in cells if one["gain_interval"][0] > 0]
    better = [one for one in cells if one["gain_interval"][1] < 0]
    return worse, [one for one in cells if one not in worse and one not in better], better


def _equal(one: float | None, other: float) -> bool:
    """Return whether two recipes store equally many bytes, by the rule for natural text."""
    return one is not None and max(one, other) <= SAME_BYTES * min(one, other)


def _sentence(where: str, worse: Sequence[Result], level: Sequence[Result], better: Sequence[Result]) -> str:
    text = f"{where}: `weave` scores higher than {len(worse)} of {len(worse) + len(level) + len(better)} other recipes"
    if better:
        text += f", lower than {', '.join(_names(better))}"
    if level:
        text += f"; there is no significant difference from {', '.join(_names(level))}"
    return f"- {text}."


def _tasks(quality: Result) -> list[str]:
    return [f"`{task}`" for task in dict.fromkeys(row["task"] for row in quality["rows"]) if task != OVERALL]


def on_own_preparation(recipe: str) -> bool:
    """Return whether a recipe is a method on its own preparation; the matrix has the others."""
    return "+" not in recipe


def _names(cells: Iterable[Result]) -> list[str]:
    return [f"`{one['recipe']}`" for one in cells]


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
