"""The figures and tables of CacheClip."""

from figure_rows import (
    NOT_MEASURED,
    REFERENCE,
    Figure,
    Results,
    Seen,
    above,
    claim,
    number,
    present,
    reaches,
    score_rows,
    shown,
    together,
    without_verdict,
)

NEEDLES = ("single", "multikey", "multivalue", "multiquery")
RATIO = 0.1  # the only one at which every task was measured, beside 0.05
READINGS = ("cacheclip", "cacheclip-windows")


def _auxiliary(results: Results) -> Seen | None:
    found = results("selection")
    if found is None:
        return None
    small, first = (number(found["auxiliary"][name]) for name in ("kl", "own_kl"))
    where = f"{REFERENCE} and its auxiliary model, {found['context_tokens']:.0f} tokens, {found['samples']} prompts"
    seen = Seen(
        above(first, small),
        where,
        f"KL {shown(small, '.2f')}, of the own first layer {shown(first, '.2f')} nats",
    )
    return without_verdict(
        seen,
        "this auxiliary model was trained to attend as the large one does, so it says nothing about other pairs",
    )


def _needles(results: Results) -> Seen | None:
    points, point_texts = [], []
    for task in NEEDLES:
        rows = score_rows(results, "all_tasks", task, RATIO)
        name = present(rows, *READINGS)
        if name is not None:
            mine, other = number(rows[name], "score"), number(rows["cacheblend"], "score")
            points.append(above(mine, other))
            point_texts.append(f"`{task}` {mine.value:.3f} against {other.value:.3f}")
    if not points:
        return None
    where = f"{REFERENCE}, 512 tokens, 200 prompts of a task; plain reuse loses next to nothing on them"
    return Seen(
        together(points), where, f"at {RATIO:.0%}, `{name}` and `cacheblend`: {'; '.join(point_texts)}"
    )


def _prefill(results: Results) -> Seen | None:
    found = results("selection_cost")
    if found is None:
        return None
    rows = {row["recipe"]: row for row in found["rows"]}
    name = present(rows, *READINGS)
    if name is None:
        return None
    speedup = 1 / rows[name]["ttft_over_full"]
    where = f"shape of {found['shape']} on a processor, {found['prompt_tokens']:,} tokens, the KV in memory"
    held = reaches(speedup, 1.92)
    label = f"held at {found['ratio']:.0%} of {found['prompt_tokens']:,} tokens" if held else ""
    return Seen(held, where, f"{speedup:.1f}× at {found['ratio']:.0%}, the auxiliary model included", label)


_LENGTHS = "the shipped model's context is shorter; another one needs `--model`"
_LONGBENCH = "LongBench's data and a model of 14B are not at hand; `kvweave eval --longbench FILE --model …` measures it"

ROWS = (
    Figure("fig. 2", "The last layers of a small and a large model attend alike, more than the large one's first layer does.", _auxiliary),
    Figure("fig. 4", "Better than APE and CacheBlend on RULER's needles at 20 %, most on MultiValue.", _needles),
    Figure("fig. 5, table 3", "CacheBlend falls between 30 and 70 % where numbers are split into tokens; windows avoid it.", claim("fragments")),
    Figure("fig. 6", "More recomputation steadily helps CacheBlend on multi-key needles.", "plain reuse answers all of them here, so nothing can be won back"),
    Figure("fig. 7", "Best of the methods on LongBench.", _LONGBENCH),
    Figure("table 1", "1.92 times faster prefill at 20 %, 16K tokens, with the selector on the processor.", _prefill),
    Figure("§3.1, 3.3, 3.5", "Windows, a shared prefix and fine-tuning each add to the score.", claim("cacheclip-parts")),
    Figure("table of app. A, APE", "On RULER's needles it falls from 82.5 % at 4K tokens to 67.8 % at 16K.", _LENGTHS, NOT_MEASURED),
    Figure("table of app. A, CacheBlend", "It falls to 65.0 % (30 % recomputed, 4K) and 48.5 % (40 %, 8K); at 90 % it has over 99 %.", f"{_LENGTHS}; the fall is looked at in fig. 5's row", NOT_MEASURED),
    Figure("table of app. A, CacheClip", "90.8 % at 10 % recomputed, 94.5 % at 20 %, 99.25 % at 90 % (8K tokens).", _LENGTHS, NOT_MEASURED),
    Figure("table of app. A, LongBench", "At 20 % above CacheBlend on three tasks, below APE on one of them.", _LONGBENCH),
)  # fmt: skip
"""Figures 1 and 3 are drawings."""
