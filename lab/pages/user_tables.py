"""Tables of results on pages for users: speed and accuracy at the top of README, scores in the guide to recipes."""

from collections.abc import Mapping
from typing import Any

from markdown_parts import NOT_MEASURED, header, row

from kvweave.plugins import LAB
from kvweave_lab.eval.rows import OVERALL


def speed_and_quality(
    speed: Mapping[str, Any] | None,
    natural: Mapping[str, Any] | None,
    neutral: Mapping[str, Any] | None,
    recipe: str,
    ratio: float,
) -> str:
    """Return one table: a recipe at its own ratio beside full prefill and plain reuse.

    `speed` is of `kvweave bench ttft` and `natural` of `kvweave eval natural`, on one model and one length; `neutral` is of
    `kvweave eval --tasks neutral`, on the shipped model.
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
    units = "" if "AMX" in speed["machine"] else " without matrix units"
    lines = [
        *header("", "full prefill", "plain reuse", "kvweave"),
        row(
            "first token",
            f"{fast['full_s']:.2f} s",
            f"{plain['ttft_s']:.2f} s",
            f"**{fast['ttft_s']:.2f} s ({fast['speedup']:.1f}× faster)**",
        ),
        row(
            "same first token as full prefill",
            "100%",
            f"{reused['same_first']:.0%}",
            f"{own['same_first']:.0%}",
        ),
        row("distance from full prefill (KL)", "0", f"{reused['kl']:.3f}", f"{own['kl']:.3f}"),
        row("NLL of right answers", *(f"{one['nll']:.2f}" for one in (read["full"], reused, own))),
        row(
            f"accuracy, {tasks} generated tasks",
            *(f"{scored[name]:.3f}" for name in ("full_score", "reuse_score", "score")),
        ),
        "",
        f"`{recipe}`, the default until [calibrated](docs/guide/recipes.md#calibration), recomputes {ratio:.0%}. First four rows: "
        f"{about['model']}, {' and '.join(dict.fromkeys((fast['dtype'], about['dtype'])))}, {fast['context_tokens']:,} tokens of retrieved text, {own['prompts']} questions, "
        f"{fast['threads']} {fast['device'].upper()} threads{units}, exact KV in memory. **Last row: another model and length**, the shipped 10 MB "
        f"model, {scored['context_tokens']:,} tokens, {scored['samples']:,} prompts. Measured on "
        "[natural text](lab/docs/natural.md) and [generated tasks](lab/docs/methods.md).",
    ]
    return "\n".join(lines)


def recipe_scores(quality: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> str:
    """Return the table of docs/guide/recipes.md: accuracy over all tasks by ratio, and what selecting costs."""
    if quality is None or cost is None:
        return NOT_MEASURED
    overall = [one for one in quality["rows"] if one["task"] == OVERALL]
    scores = {(one["recipe"], one["ratio"]): f"{one['score']:.3f}" for one in overall}
    shares = {one["recipe"]: f"{one['select_over_full']:.1%}" for one in cost["rows"]}
    ratios = sorted({ratio for _, ratio in scores} - {1.0})
    lines = header("recipe", *(f"{ratio:.0%}" for ratio in ratios), "selecting")
    for name in dict.fromkeys(recipe for recipe, _ in scores):
        if name in LAB["kvweave.recipes"] or "+" in name or name == "full":
            continue  # a user of the package cannot choose it, it is not on its own preparation, or it is in the text
        cells = (scores.get((name, ratio), "") for ratio in ratios)
        lines.append(row(f"`{name}`", *cells, shares.get(name, "")))
    about = overall[0]
    return "\n".join(
        [
            f"Accuracy by the share of stale tokens recomputed: mean over tasks that favour no placement, {about['samples']:,} prompts of {about['context_tokens']:,} "
            f"tokens. Full attention: {scores['full', 1.0]}.{_prepared(scores)} Selecting: its time as a share of full prefill, {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']}, ratio "
            f"{cost['ratio']:g}.",
            "",
            *lines,
        ]
    )


def _prepared(scores: Mapping[tuple[str, float], str]) -> str:
    """Return what the preparation of the default recipe gives without any recomputation."""
    found = scores.get(("following+reuse", 0.0))
    return f" `reuse` on chunks prepared as `following`: {found}." if found else ""
