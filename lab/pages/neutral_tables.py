"""Tables of lab/docs/methods.md about generated tasks: the neutral tasks, and the same prompts against the order of the text."""

from collections.abc import Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header
from markdown_parts import row as table_row
from methods_findings import on_own_preparation

from kvweave_lab.eval.rows import OVERALL, length_text
from kvweave_lab.eval.tasks.mixed import PERMUTED

NEVER = "–"


def by_task(quality: Result | None) -> list[str]:
    """Return a table with a row per recipe and a column per task. Tasks that plain reuse solves show that recipes break nothing."""
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
            scores = (NEVER if one is None else f"{one['score']:.3f}" for one in found[:-1])
            cost = _cost(costs.get(recipe)) if costs else ()
            lines.append(
                table_row(f"`{recipe}`", f"{ratio:.0%}", *scores, estimate(found[-1], "score"), *cost)
            )
        lines.append("")
    return [*lines, *folded(commands(quality), quality["date"]), ""]


def _without_context(quality: Result, tasks: Sequence[str]) -> str:
    """Return the row of scores without any chunk; the last score is the mean."""
    scores = quality["completed"]["without_context"]
    mean = sum(scores.values()) / len(scores)
    return table_row("no context", "–", *(f"{scores.get(task, mean):.3f}" for task in tasks), NEVER, NEVER)


def by_bytes(quality: Result | None) -> list[str]:
    """Return a table of recipes on all preparations, ordered by stored bytes and passes, with the gain of `weave` over each."""
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
            f"The next table has every recipe on every preparation with {length_text(length)}, ordered by stored bytes. The last column is the"
            " mean paired difference between `weave` and the recipe at the same ratio. `isolated` and `similar` chunks are computed"
            " without the chunk before them.",
            "",
            *header("recipe", "ratio", "bytes/token", "passes", "mean", "`weave` minus the recipe"),
        ]
        for row in sorted(prepared, key=lambda row: _spent(costs[row["recipe"]])):
            gain = estimate(gains.get((row["recipe"], row["ratio"])), "gain", "+.3f")
            cells = (f"{row['ratio']:.0%}", *_cost(costs[row["recipe"]]), estimate(row, "score"), gain)
            lines.append(table_row(f"`{row['recipe']}`", *cells))
        lines.append("")
    about = quality["completed"]
    return [
        *lines,
        "Bytes are the stored KV and features per token of a chunk, and passes are the tokens run through the model per token of a chunk, both "
        f"counted while a recipe prepares the {about['chunks']} chunks of the first prompts of these tasks in an empty store. A second model "
        "is not counted. Most of these chunks are the first of their document, so `following` costs little here.",
        "",
    ]


def _spent(cost: Result) -> tuple[int, float]:
    """Return the sort key of a recipe: stored bytes, then passes."""
    return round(cost["bytes_per_token"] / 100), cost["passes"]


def against_the_text(permuted: Result | None, neutral: Result | None) -> list[str]:
    """Return the scores with chunks against the order of the text, and those of the same prompts in that order."""
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
        f"These are the same {prompts} prompts of {len(tasks)} tasks with their chunks in a random order, in which the chunk that refers back comes before the"
        f" chunk that it refers to, possibly with other chunks between them. In {prompts - there['samples']} of the prompts one of the two chunks was not"
        f" retrieved; the {there['samples']} others have a column of their own. *In the order of the text* is the mean of the same prompts in the table above.",
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
            *(NEVER,) * 4,
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
                estimate(own[recipe, ratio, OVERALL], "score"),
                f"{sum(known) / len(known):.3f}" if len(known) == len(tasks) else NEVER,
                estimate(against[recipe, ratio], "score"),
                *_cost(costs.get(recipe)),
            )
        )
    found = _against_full(against)
    return [*lines, "", *found, "", *folded(commands(permuted), permuted["date"]), ""]


def _against_full(against: Mapping[tuple[str, float], Result]) -> list[str]:
    """Return the recipes that answer more or fewer of these prompts than full attention, and an explanation."""
    full, others = against["full", 1.0], [one for (name, _), one in against.items() if name != "full"]
    more = [f"`{one['recipe']}`" for one in others if one["lost_interval"][1] < 0]
    fewer = [f"`{one['recipe']}`" for one in others if one["lost_interval"][0] > 0]
    by_name = {one["recipe"]: estimate(one, "score") for one in others}
    lines = [
        f"On prompts with both chunks, full attention scores {estimate(full, 'score')}. Of {len(others)} recipes, {len(more)} score significantly higher"
        f" ({', '.join(more) or 'none'}), {len(fewer)} lower ({', '.join(fewer) or 'none'}), and {len(others) - len(more) - len(fewer)} do not differ."
    ]
    if "following+reuse" in by_name:
        lines += [
            "",
            "**Full attention rarely answers right here, so a comparison with it says little.** The order of the prompt hides the right answer, which"
            " follows from the order of the document. A chunk that was prepared after the chunk before it in its document was computed with the"
            f" sentence it refers to: with nothing recomputed, `following` chunks reach {by_name['following+reuse']} and `woven` chunks"
            f" {by_name['woven+reuse']}. Recomputed tokens attend to the prompt instead and lose this: `cacheblend` on the same `following` chunks reaches"
            f" {by_name['following+cacheblend']}, `prophetkv` {by_name['following+prophetkv']}, and `weave` {by_name['weave']}.",
        ]
    return lines


def _costs_of(quality: Result) -> dict[str, Result]:
    return {one["recipe"]: one for one in quality.get("costs", ())}


def _cost(one: Result | None) -> tuple[str, str]:
    return (NEVER, NEVER) if one is None else (f"{one['bytes_per_token']:,.0f}", f"{one['passes']:.2f}")


def commands(quality: Result) -> list[str]:
    after = [quality["completed"]["command"]] if "completed" in quality else []
    return [*quality["evaluations"], quality["command"], *after]


def estimate(row: Result | None, measure: str, form: str = ".3f") -> str:
    if row is None or row[measure] is None:
        return NEVER
    low, high = row[f"{measure}_interval"]
    return f"{row[measure]:{form}} ({low:{form}}–{high:{form}})"
