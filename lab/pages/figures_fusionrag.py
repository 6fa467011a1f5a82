"""The figures and tables of FusionRAG."""

from collections.abc import Mapping
from typing import Any

from figure_rows import (
    NOT_MEASURED,
    REFERENCE,
    Figure,
    Number,
    Results,
    Seen,
    above,
    claim,
    in_words,
    natural_place,
    natural_rows,
    number,
    reaches,
    score_rows,
    shown,
    together,
    without_verdict,
)

RATIO = 0.15
OTHERS = ("cacheblend", "cachecraft")
OWN, OTHER = "fusionrag", "cacheblend"


def _quality(results: Results) -> Seen | None:
    found, answered = results("natural_1k"), results("natural_answers")
    if found is None or answered is None:
        return None
    rows, answers = natural_rows(found), natural_rows(answered)
    mine, other = (number(rows[name], "nll_recovery") for name in (OWN, OTHER))
    f1, other_f1 = (number(answers[name], "f1") for name in (OWN, OTHER))
    points = [above(mine, 0.8), above(mine, other), above(f1, other_f1)]
    crafted = natural_rows(results("natural_others")).get("cachecraft")
    beside = (
        f"`cachecraft` {shown(number(crafted, 'nll_recovery'), '.2f')} on {crafted['prompts']} of the prompts, not compared"
        if crafted
        else "`cachecraft` not measured on these"
    )
    text = (
        f"NLL recovered {shown(mine, '.2f')}, `{OTHER}` {shown(other, '.2f')}, {beside}; F1 {shown(f1)}, `{OTHER}` {shown(other_f1)}, "
        f"reuse {answers['reuse']['f1']:.3f}, full {answers['full']['f1']:.3f}{_generated(results)}"
    )
    return Seen(together(points), natural_place(found, rows[OWN]), text, in_words(points))


def _generated(results: Results) -> str:
    """Return the scores on generated tasks, whose chunks are drawn at random instead of retrieved."""
    rows = score_rows(results, "neutral", "overall", 0.1)
    if OWN not in rows:
        return ""
    scores = ", ".join(f"`{name}` {rows[name]['score']:.3f}" for name in (OWN, *OTHERS) if name in rows)
    return f". Generated tasks, chunks drawn: {scores}, reuse {rows['reuse']['score']:.3f}"


def _faithful(results: Results) -> Seen | None:
    rows = score_rows(results, "neutral", "overall", 0.1)
    if OWN not in rows:
        return None
    mine = number(rows[OWN], "faithfulness")
    others = {other: number(rows[other], "faithfulness") for other in OTHERS if other in rows}
    held = together(above(mine, other) for other in others.values())
    beside = ", ".join(f"`{other}` {shown(value)}" for other, value in others.items())
    row = rows[OWN]
    where = f"{REFERENCE}, {row['context_tokens']} tokens, {row['samples']} prompts of generated tasks, {row['ratio']:.0%}"
    return Seen(held, where, f"`{OWN}` {shown(mine)}, {beside}")


def _deviation(results: Results) -> Seen | None:
    found = results("selection")
    if found is None:
        return None
    off = found["deviation"]["isolated"]
    head, later = number(off["depths"][0]), [number(part) for part in off["chunks"][1:]]
    held = together([above(head, 0.5), above(later[-1], later[0])])
    text = f"{head.value:.0%} of it in the first tenth of a chunk; by chunk {_shares(later)}"
    return Seen(held, f"{REFERENCE}, {found['context_tokens']:.0f} tokens, {found['samples']} prompts", text)


def _deviation_left(results: Results) -> Seen | None:
    found = results("deviation_left")
    if found is None:
        return None
    left = {kind: number(layers[1]) for kind, layers in found["left"].items()}
    last = number(found["left"]["isolated"][-1])
    text = (
        f"{shown(left['isolated'])} of the second layer's is left, of the last layer's {shown(last)}; in the second layer of chunks without"
        f" the system prefix {shown(left['bare'])}"
    )
    where = f"{REFERENCE}, {found['context_tokens']:.0f} tokens, {found['samples']} prompts"
    return Seen(above(left["isolated"], 0.5), where, text)


def _shares(parts: list[Number]) -> str:
    return ", ".join(f"{part.value:.2f}" for part in parts)


def _retrieved_together(results: Results) -> Seen | None:
    found = results("natural_retrieval")
    if found is None:
        return None
    retrieved = found["retrieval"]
    counts = retrieved["neighbours"]
    by_length = {
        one["context_tokens"]: dict(zip(counts, map(number, one["any_together"]), strict=True))
        for one in retrieved["contexts"]
    }
    points = [above(shares[10], 0.8) for shares in by_length.values()]
    text = "; ".join(
        f"{tokens:,} tokens: one of ten {shown(shares[10])}, the nearest {shown(shares[1])}"
        for tokens, shares in by_length.items()
    )
    where = (
        f"retrieval on natural text, {len(by_length)} lengths of context, {retrieved['questions']} questions"
    )
    return Seen(together(points), where, text, in_words(points))


def _similar_deviation(results: Results) -> Seen | None:
    found = results("selection")
    if found is None:
        return None
    isolated, similar = (number(found["deviation"][kind]["relative"][1]) for kind in ("isolated", "similar"))
    where = f"{REFERENCE}, {found['context_tokens']:.0f} tokens, {found['samples']} prompts"
    return Seen(
        above(isolated, similar), where, f"isolated {shown(isolated, '.4f')}, similar {shown(similar, '.4f')}"
    )


def _on_processor(results: Results) -> Seen | None:
    return _first_token(results("ttft_longest"), "processor")


def _on_gpu(results: Results) -> Seen | None:
    return _first_token(results("ttft_gpu"), "GPU")


def _first_token(found: Mapping[str, Any] | None, device: str) -> Seen | None:
    if found is None:
        return None
    longest = max(row["context_tokens"] for row in found["rows"])
    speedup = {
        (row["recipe"], row["ratio"]): row["speedup"]
        for row in found["rows"]
        if row["context_tokens"] == longest and row["kv_from"] == "memory"
    }
    none, some = speedup["reuse", 0.0], speedup["prophetkv", RATIO]
    where = f"{device}: shape of {found['rows'][0]['shape']}, {longest:,} tokens, KV in memory, `prophetkv`'s pass"
    held = together([reaches(none, 5.22), reaches(some, 2.66)])
    seen = Seen(held, where, f"{none:.1f}× at 0 %, {some:.1f}× at 15 %")
    own = any(recipe == OWN for recipe, _ in speedup)
    return without_verdict(seen, "" if own else f"`{OWN}` itself was not timed")


def _operator(results: Results) -> Seen | None:
    found = results("row_attention_gpu")
    if found is None:
        return None
    rows = {row["way"]: row for row in found["rows"]}
    fast = rows[found["chosen"]]
    all_rows, mask = fast["of_all"], fast["of_mask"]
    held = together([reaches(all_rows[1], 4.2), reaches(mask[1], 2.69)])
    where = f"shape of {found['shape']}, {found['context_tokens']:,} tokens, {found['device']}"
    text = f"{all_rows[0]:.2f}× over all rows (paper 4.2), {mask[0]:.2f}× over a mask (paper 2.69)"
    return Seen(held, where, text)


def _throughput(results: Results) -> Seen | None:
    found = results("serve")
    if found is None:
        return None
    best = {row["system"]: row for row in found["throughput"]["equal"] if row["requests_per_s"]}
    if not {"default", "full"} <= best.keys():
        return None
    ratio = best["default"]["requests_per_s"] / best["full"]["requests_per_s"]
    tokens = found["throughput"]["prompt_tokens"]["default"]
    where = f"{found['throughput']['model']} on a processor, {tokens:,.0f} tokens, one round"
    text = (
        f"`weave` {ratio:.2f}× full prefill at an equal time to the first token; `fusionrag` was not served"
    )
    return Seen(None, where, text)


def _every_selector(results: Results) -> Seen | None:
    """Compare similar with isolated chunks: FusionRAG's own selector on retrieved chunks, many selectors on generated tasks."""
    found = results("natural_1k")
    if found is None:
        return None
    rows = natural_rows(found)
    alone, similar = rows[f"isolated+{OWN}"], rows[OWN]
    points = [above(number(similar, name), number(alone, name)) for name in ("nll_recovery", "kl_recovery")]
    blend, woven = (number(rows[name], "nll_recovery") for name in (OTHER, f"woven+{OTHER}"))
    text = (
        f"`{OWN}`, NLL recovered {_from_to(alone, similar, 'nll_recovery')}, KL {_from_to(alone, similar, 'kl_recovery')}; no other selector on "
        f"similar chunks alone, `{OTHER}` {shown(blend, '.2f')}, after `woven` chunks {shown(woven, '.2f')}{_drawn_cells(results)}"
    )
    return Seen(together(points), natural_place(found, similar), text, in_words(points))


def _from_to(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> str:
    return " → ".join(shown(number(row, name), ".2f") for row in (first, second))


def _drawn_cells(results: Results) -> str:
    """Return the gains of similar chunks for every selector on generated tasks, where similar chunks meet only by chance."""
    cells = [
        cell
        for matrix in (results("methods") or {"matrices": []})["matrices"]
        if matrix["ratio"] == RATIO
        for cell in matrix["cells"]
        if cell["preparation"] == "similar" and cell["gain"] is not None
    ]
    if not cells:
        return ""
    gains = [number(cell, "gain") for cell in cells]
    lower, higher = sum(gain.high < 0 for gain in gains), sum(gain.low > 0 for gain in gains)
    return (
        f". Generated tasks that favour a placement, chunks drawn, `{OWN}` of an earlier reading: "
        f"{lower} of {len(gains)} selectors score lower, {higher} higher"
    )


def _parts(results: Results) -> Seen | None:
    found = results("natural_1k")
    if found is None:
        return None
    rows = natural_rows(found)
    alone, both = rows[f"isolated+{OWN}"], rows[OWN]
    selected, restored = (number(row, "nll_recovery") for row in (alone, both))
    points = [above(selected, 0.72), above(restored, 0.99), above(restored, selected)]
    text = (
        f"NLL recovered: selection alone {shown(selected, '.2f')}, with similar chunks {shown(restored, '.2f')}; KL "
        f"{_from_to(alone, both, 'kl_recovery')}. Generated tasks, an earlier reading: see [below](#fusionrag-component-by-component)"
    )
    return Seen(together(points), natural_place(found, both), text, in_words(points))


def _neighbours(results: Results) -> Seen | None:
    seen = claim("neighbours")(results)
    if seen is None:
        return None
    text = f"{seen.numbers}; `fusionrag-alone`, chunks drawn. Five and ten on natural text: [why five](natural.md#why-weave-prepares-chunks-as-it-does)"
    return seen._replace(numbers=text)


def _stored_once(results: Results) -> Seen | None:
    found = results("reuse")
    if found is None:
        return None
    caches = {row["cache"]: row for row in found["points"][0]["caches"]}
    mine = caches["anywhere"]
    saved = 1 - mine["storage_of_prefix"]
    held = together([reaches(saved, 0.71, even=0.0), reaches(mine["avoided"], 0.823, even=0.0)])
    text = f"storage −{saved:.0%} (paper −71 %), {mine['avoided']:.0%} of recomputations avoided (82 %)"
    return Seen(held, "counted, 1,000 questions drawn as in the paper; no model", text)


ROWS = (
    Figure("figs. 2, 13", "At 15 % it recovers at least 80 % in 12 of 20 cases, more than CacheBlend and Cache-Craft.", _quality),
    Figure("fig. 3a", "Recomputing the 15 % with the largest deviation leaves over half of the second layer's.", _deviation_left),
    Figure("fig. 3b", "Second-layer deviation is at the beginnings of chunks, and larger in later chunks.", _deviation),
    Figure("fig. 7a", "In over 80 % of cases, one of a chunk's ten most similar chunks is retrieved with it.", _retrieved_together),
    Figure("fig. 7b", "Preparation after similar chunks lowers the second layer's deviation by 70 %.", _similar_deviation),
    Figure("fig. 8", "CacheBlend selects at beginnings and in late chunks, the question's selection evenly.", claim("heads")),
    Figure("fig. 9", "OpenPangu-1B recovers full attention's quality on TriviaQA.", "neither the model nor the data set is at hand"),
    Figure("fig. 14a", "First token 5.2–9.4 times sooner at 0 %, 2.7–3.9 times at 15 % (27K tokens, GPU).", _on_gpu),
    Figure("fig. 14a", "The same on a processor.", _on_processor),
    Figure("fig. 14b", "The sparse operator is 4.2 times faster than FlashAttention, 2.69 times than a mask (32K tokens).", _operator),
    Figure("fig. 15", "1.2–4.3 times the throughput of the baselines.", _throughput),
    Figure("fig. 16", "Similar chunks lift every selector, CacheBlend by 21–49 %.", _every_selector),
    Figure("fig. 17", "Ten neighbours are best.", _neighbours),
    Figure("fig. 18", "Selection alone restores 72 %, with similar chunks 99 %.", _parts),
    Figure("fig. 19", "Fastest from host memory and from an SSD at every length.", "`fusionrag`'s time was not measured by length; [other recipes](ttft.md#by-length-from-memory-and-from-the-disk) were", NOT_MEASURED),
    Figure("table 2", "The most faithful answers at 15 %.", _faithful),
    Figure("§5.3.3", "Alternative paths save 71 % of the storage and 82 % of the recomputations.", _stored_once),
)  # fmt: skip
"""Figures 1, 4 to 6 and 10 to 12 and table 1 are drawings and definitions."""
