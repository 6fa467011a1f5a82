"""Tables of results on pages for users: what is kept of full prefill, at the top of README; scores in the guide to recipes."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_parts import NOT_MEASURED, header, row

from kvweave.plugins import plugins
from kvweave.recipes.methods import DEFAULT_STORAGE, METHODS, recipe_named
from kvweave.recipes.names import OWN_METHODS
from kvweave_lab.eval.rows import OVERALL
from kvweave_lab.real_models import MODELS


def kept_of_full_prefill(runs: Mapping[str, Sequence[Mapping[str, Any]]], recipe: str) -> str:
    """Return README's table: what plain reuse, the nearest other method and a recipe keep of full prefill, and in which time.

    The nearest other method is the one whose distribution is nearest to full attention's along its answers.

    Args:
        runs: by the model's name, results of `kvweave eval natural --answers`, of one length each; the last is shown.
        recipe: the name of the recipe; its row at its own ratio is shown, and that with 8-bit KV where there is one.
    """
    shown = {name: runs[name][-1] for name in reversed(MODELS) if name in runs}
    if not shown:
        return NOT_MEASURED
    lines = header("", "", "plain reuse", "nearest other method", "kvweave")
    for model, run in shown.items():
        about, rows = run["about"], run["rows"]
        full, plain, own = _row_of(rows, "full"), _row_of(rows, "reuse"), _own_row(rows, recipe)
        other = min(filter(_is_other_method, rows), key=lambda one: one["answer_kl"])
        conditions = (
            f"**{MODELS[model].title}**, {full['context_tokens']:,} tokens in chunks of {about['chunk_tokens']}, "
            f"{about['dtype']}, {full['prompts']} questions, {'8-bit' if own['recipe'] != recipe else 'exact'} KV in the last column"
        )
        times = [f"{one['time']:.2f}" for one in (plain, other, own)]
        right = round(full["contains"] * full["prompts"])
        kept = [round(one["kept_right"] * right) for one in (plain, other, own)]
        lines += [
            row(conditions, "time to the first token, full prefill: 1", *times[:2], f"**{times[2]}**"),
            row(
                "",
                f"its {right} right answers that stay right",
                str(kept[0]),
                f"{kept[1]} (`{other['recipe']}`)",
                str(kept[2]),
            ),
            row("", "tokens of its answers", *(f"{one['agreed']:.1%}" for one in (plain, other, own))),
        ]
    about = next(iter(shown.values()))["about"]
    lines += [
        "",
        f"The last column is `{recipe}`, the default recipe until you [calibrate](docs/guide/recipes.md#calibration): "
        f"{METHODS[recipe]().ratio:.0%} of the reused tokens are recomputed, and the others shifted. The nearest other method is that with the "
        "lowest KL, of those that were measured, at its usual ratio and from exact KV. *Tokens of its answers*: the share of the tokens of full prefill's answer that are "
        "chosen too, each behind those before it. There are few right answers, so that the intervals are wide. Times are from KV "
        f"in memory, on {about['threads']} CPU threads ({about['machine']}). [All methods, with intervals and "
        "commands](lab/docs/real-models.md#quality-kept-against-time).",
    ]
    return "\n".join(lines)


def _row_of(rows: Sequence[Mapping[str, Any]], recipe: str) -> Mapping[str, Any]:
    return next(one for one in rows if one["recipe"] == recipe)


def _own_row(rows: Sequence[Mapping[str, Any]], recipe: str) -> Mapping[str, Any]:
    """Return the recipe's row at its own ratio, with KV as a knowledge base stores it if that was measured."""
    ratio = METHODS[recipe]().ratio
    found = {one["recipe"]: one for one in rows if one["ratio"] == ratio}
    return found.get(recipe_named(f"{DEFAULT_STORAGE}+{recipe}").name) or found[recipe]


def _is_other_method(result: Mapping[str, Any]) -> bool:
    """Whether a row is of a published method that recomputes tokens, on chunks prepared as its paper does."""
    method = OWN_METHODS.get(result["recipe"])
    ours = method is not None and method.function.startswith("weave:")
    return method is not None and not ours and METHODS[result["recipe"]]().select.selective


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
