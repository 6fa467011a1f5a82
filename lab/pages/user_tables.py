"""Tables of results on pages for users: speed and accuracy at the top of README, scores in the guide to recipes."""

from collections.abc import Mapping
from typing import Any

from markdown_parts import NOT_MEASURED, header, row

from kvweave.plugins import plugins
from kvweave_lab.eval.rows import OVERALL


def speed_and_quality(
    speed: Mapping[str, Any] | None,
    natural: Mapping[str, Any] | None,
    neutral: Mapping[str, Any] | None,
    recipe: str,
    ratio: float,
) -> str:
    """Return README's table: full prefill, plain reuse and a recipe at its own ratio.

    Args:
        speed: the result of `kvweave bench ttft`.
        natural: the result of `kvweave eval natural` on the same model and length.
        neutral: the result of `kvweave eval --tasks neutral` on the shipped model.
        recipe: the name of the recipe.
        ratio: the recipe's own ratio.
    """
    if speed is None or natural is None or neutral is None:
        return NOT_MEASURED
    timed = {(one["recipe"], one["ratio"]): one for one in speed["rows"]}
    fast, plain = timed[recipe, ratio], timed["reuse", 0.0]
    read = {one["recipe"]: one for one in natural["rows"] if one["context_tokens"] == fast["context_tokens"]}
    own, reused = read[recipe], read["reuse"]
    scored = next(
        one
        for one in neutral["rows"]
        if (one["task"], one["recipe"], one["ratio"]) == (OVERALL, recipe, ratio)
    )
    tasks = len({one["task"] for one in neutral["rows"]} - {OVERALL})
    about = natural["about"]
    read_by = f"{about['model']}, {fast['context_tokens']:,} tokens"
    units = "" if "AMX" in speed["machine"] else " without matrix units"
    lines = [
        *header("", "full prefill", "plain reuse", "kvweave"),
        row(
            f"first token ({read_by}, {fast['threads']} {fast['device'].upper()} threads)",
            f"{fast['full_s']:.2f} s",
            f"{plain['ttft_s']:.2f} s",
            f"**{fast['ttft_s']:.2f} s ({fast['speedup']:.1f}× faster)**",
        ),
        row(
            f"same first token as full prefill ({read_by})",
            "100%",
            f"{reused['same_first']:.0%}",
            f"{own['same_first']:.0%}",
        ),
        row(f"distance from full prefill, KL ({read_by})", "0", f"{reused['kl']:.3f}", f"{own['kl']:.3f}"),
        row(
            f"NLL of right answers ({read_by})", *(f"{one['nll']:.2f}" for one in (read["full"], reused, own))
        ),
        row(
            f"accuracy, {tasks} generated tasks (**shipped 10 MB model**, {scored['context_tokens']:,} tokens)",
            *(f"{scored[name]:.3f}" for name in ("full_score", "reuse_score", "score")),
        ),
        "",
        f"The last column is `{recipe}`, the default recipe until you [calibrate](docs/guide/recipes.md#calibration), with {ratio:.0%} of the tokens recomputed. The first four rows are of "
        f"{about['model']}, {' and '.join(dict.fromkeys((fast['dtype'], about['dtype'])))}, {fast['context_tokens']:,} tokens of retrieved text, {own['prompts']} questions, "
        f"{fast['threads']} {fast['device'].upper()} threads{units}, with exact KV in memory, on [natural text](lab/docs/natural.md). **The last row is of another model and length**: "
        f"the shipped 10 MB model on {scored['samples']:,} [generated prompts](lab/docs/methods.md) of {scored['context_tokens']:,} tokens.",
    ]
    return "\n".join(lines)


def recipe_scores(quality: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> str:
    """Return the table of docs/guide/recipes.md: accuracy by recipe and ratio, and the time to select tokens."""
    if quality is None or cost is None:
        return NOT_MEASURED
    overall = [one for one in quality["rows"] if one["task"] == OVERALL]
    scores = {(one["recipe"], one["ratio"]): f"{one['score']:.3f}" for one in overall}
    shares = {one["recipe"]: f"{one['select_over_full']:.1%}" for one in cost["rows"]}
    ratios = sorted({ratio for _, ratio in scores} - {1.0})
    lines = header("recipe", *(f"{ratio:.0%}" for ratio in ratios), "selecting")
    for name in dict.fromkeys(recipe for recipe, _ in scores):
        if name in plugins("kvweave.recipes") or "+" in name or name == "full":
            continue  # part of the lab, on another preparation, or named in the text
        cells = (scores.get((name, ratio), "") for ratio in ratios)
        lines.append(row(f"`{name}`", *cells, shares.get(name, "")))
    about = overall[0]
    return "\n".join(
        [
            f"The table has the accuracy by the share of stale tokens that are recomputed. It is the mean over tasks that favour no placement, {about['samples']:,} prompts of {about['context_tokens']:,} "
            f"tokens. Full attention reaches {scores['full', 1.0]}.{_prepared(scores)} *Selecting* is the time to choose the tokens, as a share of full prefill, for {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']} at ratio "
            f"{cost['ratio']:g}.",
            "",
            *lines,
        ]
    )


def _prepared(scores: Mapping[tuple[str, float], str]) -> str:
    """Return a sentence on the accuracy of plain reuse of `following` chunks, or nothing if it was not measured."""
    found = scores.get(("following+reuse", 0.0))
    return f" `reuse` of `following` chunks reaches {found}." if found else ""
