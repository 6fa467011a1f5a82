"""Tables of lab/docs/methods.md about generated tasks: the neutral ones, and the same prompts against the order of the text."""

from collections.abc import Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, folded, header
from markdown_parts import row as table_row
from methods_findings import on_own_preparation

from kvweave_lab.eval.rows import OVERALL, length_text
from kvweave_lab.eval.tasks.mixed import PERMUTED

NEVER = "–"


def by_task(quality: Result | None) -> list[str]:
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
            scores = (NEVER if one is None else f"{one['score']:.3f}" for one in found[:-1])
            cost = _cost(costs.get(recipe)) if costs else ()
            lines.append(
                table_row(f"`{recipe}`", f"{ratio:.0%}", *scores, estimate(found[-1], "score"), *cost)
            )
        lines.append("")
    return [*lines, *folded(commands(quality), quality["date"]), ""]


def _without_context(quality: Result, tasks: Sequence[str]) -> str:
    """Return the line of what the model answers without any chunk; the last column of scores is the mean."""
    scores = quality["completed"]["without_context"]
    mean = sum(scores.values()) / len(scores)
    return table_row("no context", "–", *(f"{scores.get(task, mean):.3f}" for task in tasks), NEVER, NEVER)


def by_bytes(quality: Result | None) -> list[str]:
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
            gain = estimate(gains.get((row["recipe"], row["ratio"])), "gain", "+.3f")
            cells = (f"{row['ratio']:.0%}", *_cost(costs[row["recipe"]]), estimate(row, "score"), gain)
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


def against_the_text(permuted: Result | None, neutral: Result | None) -> list[str]:
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
    """Return which recipes answer more prompts against the order of the text than full attention, and what follows."""
    full, others = against["full", 1.0], [one for (name, _), one in against.items() if name != "full"]
    more = [f"`{one['recipe']}`" for one in others if one["lost_interval"][1] < 0]
    fewer = [f"`{one['recipe']}`" for one in others if one["lost_interval"][0] > 0]
    by_name = {one["recipe"]: estimate(one, "score") for one in others}
    lines = [
        f"Where both chunks are there, full attention scores {estimate(full, 'score')}. Of {len(others)} recipes {len(more)} score higher, prompt by"
        f" prompt ({', '.join(more) or 'none'}), {len(fewer)} lower ({', '.join(fewer) or 'none'}), {len(others) - len(more) - len(fewer)} are open."
    ]
    if "following+reuse" in by_name:
        lines += [
            "",
            "**Full attention no longer answers there, so what a recipe loses against it says nothing.** The right answer is the document's, and"
            " the order of the prompt hides it. A chunk that was prepared behind the one before it in its document has read what it refers to:"
            f" with nothing recomputed, `following` chunks reach {by_name['following+reuse']} and `woven` chunks {by_name['woven+reuse']}. Tokens that"
            f" are recomputed read the prompt instead, and lose that: {by_name['following+cacheblend']} with `cacheblend` behind the same"
            f" `following` chunks, {by_name['weave']} with `weave`; {by_name['following+prophetkv']} with `prophetkv` behind `following` chunks.",
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
