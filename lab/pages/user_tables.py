"""Tables of results on pages for users: speed and accuracy at the top of README, scores in the guide to recipes."""

from collections.abc import Mapping
from typing import Any

from markdown_parts import NOT_MEASURED, header, row

from kvweave.plugins import LAB
from kvweave.recipes.methods import recipe_named
from kvweave_lab.eval.rows import OVERALL


def speed_and_quality(
    speed: Mapping[str, Any] | None, quality: Mapping[str, Any] | None, recipe: str, ratio: float
) -> str:
    """Return one table: first token and accuracy of a recipe at its own ratio, beside full prefill.

    `speed` is one measurement of `kvweave bench ttft` and `quality` one of `kvweave eval`, over all tasks.
    """
    if speed is None or quality is None:
        return NOT_MEASURED
    timed = {(one["recipe"], one["ratio"]): one for one in speed["rows"]}
    fast, in_8_bits = timed[recipe, ratio], timed[recipe_named(recipe, storage="int8").name, ratio]
    scored = next(
        one
        for one in quality["rows"]
        if (one["task"], one["recipe"], one["ratio"]) == (OVERALL, recipe, ratio)
    )
    tasks = len({one["task"] for one in quality["rows"]} - {OVERALL})
    units = "" if "AMX" in speed["machine"] else " without matrix units"
    lines = [
        *header("", "full prefill", "kvweave"),
        row(
            f"first token, {fast['context_tokens']:,} tokens of context",
            f"{fast['full_s']:.1f} s",
            f"**{fast['ttft_s']:.1f} s ({fast['speedup']:.1f}× faster)**",
        ),
        row(
            f"accuracy, {tasks} synthetic tasks, {scored['context_tokens']:,} tokens of context",
            f"{scored['full_score']:.3f}",
            f"{scored['score']:.3f}",
        ),
        "",
        f"Default recipe, {ratio:.0%} of the reused tokens recomputed. **Speed and accuracy come from different models and lengths.** Speed: the "
        f"shape of {fast['shape']} with random weights, {fast['dtype']}, {fast['threads']} {fast['device'].upper()} threads{units}, "
        f"chunk KV in memory and exact ({in_8_bits['speedup']:.1f}× with the default 8-bit KV). Accuracy: the 10 MB model that ships with "
        f"kvweave, {scored['samples']:,} prompts; recomputing nothing scores {scored['reuse_score']:.3f}. How we measure "
        "[speed](lab/docs/ttft.md) and [quality, and what favours this recipe](lab/docs/methods.md).",
    ]
    return "\n".join(lines)


def recipe_scores(quality: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> str:
    """Return the table of docs/guide/recipes.md: accuracy over all tasks by ratio, and what selecting costs."""
    if quality is None or cost is None:
        return NOT_MEASURED
    overall = [one for one in quality["rows"] if one["task"] == OVERALL]
    scores = {(one["recipe"], one["ratio"]): f"{one['score']:.3f}" for one in overall}
    shares = {one["recipe"]: f"{one['select_over_full']:.1%}" for one in cost["rows"]}
    ratios = sorted({ratio for _, ratio in scores} - {0.0, 1.0})
    lines = header("recipe", "nothing", *(f"{ratio:.0%}" for ratio in ratios), "everything", "selecting")
    for name in dict.fromkeys(recipe for recipe, _ in scores):
        if name in LAB["kvweave.recipes"]:
            continue  # a user of the package cannot choose it
        cells = (scores.get((name, ratio), "") for ratio in (0.0, *ratios, 1.0))
        lines.append(row(f"`{name}`", *cells, shares.get(name, "")))
    about = overall[0]
    return "\n".join(
        [
            f"Accuracy by the share of stale tokens recomputed: mean over all tasks, {about['samples']:,} prompts of {about['context_tokens']:,} "
            f"tokens. Selecting: its time as a share of full prefill, {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']}, ratio "
            f"{cost['ratio']:g}.",
            "",
            *lines,
        ]
    )
