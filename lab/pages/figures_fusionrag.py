"""The figures and tables of FusionRAG."""

from collections.abc import Mapping
from typing import Any

from figure_rows import (
    REFERENCE,
    Figure,
    Number,
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
)

RATIO = 0.15
OTHERS = ("cacheblend", "cachecraft")
READINGS = ("fusionrag", "fusionrag-alone")


def _quality(results: Results) -> Seen | None:
    rows = score_rows(results, "methods", "overall", RATIO)
    name = present(rows, *READINGS)
    if name is None:
        return None
    mine, score = number(rows[name], "normalised"), number(rows[name], "score")
    others = [number(rows[other], "score") for other in OTHERS if other in rows]
    held = together([above(mine, 0.8), *(above(score, other) for other in others)])
    beside = ", ".join(f"`{other}` {rows[other]['score']:.3f}" for other in OTHERS if other in rows)
    return Seen(held, _where(rows[name]), f"`{name}` recovers {shown(mine)}; scores {shown(score)}, {beside}")


def _faithful(results: Results) -> Seen | None:
    rows = score_rows(results, "methods", "overall", RATIO)
    name = present(rows, *READINGS)
    if name is None:
        return None
    mine = number(rows[name], "faithfulness")
    others = {other: number(rows[other], "faithfulness") for other in OTHERS if other in rows}
    held = together(above(mine, other) for other in others.values())
    beside = ", ".join(f"`{other}` {shown(value)}" for other, value in others.items())
    return Seen(held, _where(rows[name]), f"`{name}` {shown(mine)}, {beside}")


def _where(row: Mapping[str, Any]) -> str:
    return f"{REFERENCE}, {row['context_tokens']} tokens, {row['samples']} prompts of three tasks"


def _deviation(results: Results) -> Seen | None:
    found = results("selection")
    if found is None:
        return None
    off = found["deviation"]["isolated"]
    head, later = number(off["depths"][0]), [number(part) for part in off["chunks"][1:]]
    held = together([above(head, 0.5), above(later[-1], later[0])])
    text = f"{head.value:.0%} of it in the first tenth of a chunk; by chunk {_shares(later)}"
    return Seen(held, f"{REFERENCE}, {found['context_tokens']:.0f} tokens, {found['samples']} prompts", text)


def _shares(parts: list[Number]) -> str:
    return ", ".join(f"{part.value:.2f}" for part in parts)


def _retrieved_together(results: Results) -> Seen | None:
    found = results("natural_retrieval")
    if found is None:
        return None
    retrieved = found["retrieval"]
    context = next(one for one in retrieved["contexts"] if one["context_tokens"] == 2048)
    shares = dict(zip(retrieved["neighbours"], context["any_together"], strict=True))
    one_of_ten, chance = number(shares[10]), context["by_chance"]
    text = f"one of ten {shown(one_of_ten)}, the nearest {shown(number(shares[1]))}; any one chunk by chance {chance:.4f}"
    where = f"retrieval on natural text, contexts of {context['context_tokens']:,} tokens, {retrieved['questions']} questions"
    return Seen(above(one_of_ten, 0.8), where, text)


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
    return Seen(held, where, f"{none:.1f}× at 0 %, {some:.1f}× at 15 %")


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
    matrices = (results("methods") or {"matrices": []})["matrices"]
    cells = [
        cell
        for matrix in matrices
        if matrix["ratio"] == RATIO
        for cell in matrix["cells"]
        if cell["preparation"] == "similar" and cell["gain"] is not None
    ]
    if not cells:
        return None
    gains = {cell["selector"]: number(cell, "gain") for cell in cells}
    worse = sum(gain.high < 0 for gain in gains.values())
    blend = gains["cacheblend"]
    text = f"{worse} of {len(gains)} selectors score lower, none higher; `cacheblend` {shown(blend, '+.3f')}"
    if any(gain.low > 0 for gain in gains.values()):
        text = text.replace(", none higher", "")
    where = f"{REFERENCE}, 512 tokens, {cells[0]['samples']} prompts of three tasks; neighbours in a prompt at chance"
    return Seen(together(above(gain, 0.0) for gain in gains.values()), where, text)


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
    Figure("fig. 3a", "Recomputing the 15 % with the largest deviation leaves over half of the second layer's.", "the curve by token is not stored; [the layers](selection.md) are"),
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
    Figure("fig. 17", "Ten neighbours are best.", claim("neighbours")),
    Figure("fig. 18", "Selection alone restores 72 %, with similar chunks 99 %.", claim("fusionrag-parts")),
    Figure("fig. 19", "Fastest from host memory and from an SSD at every length.", "`fusionrag`'s time was not measured by length; [other recipes](ttft.md#by-length-from-memory-and-from-the-disk) were"),
    Figure("table 2", "The most faithful answers at 15 %.", _faithful),
    Figure("§5.3.3", "Alternative paths save 71 % of the storage and 82 % of the recomputations.", _stored_once),
)  # fmt: skip
"""Figures 1, 4 to 6 and 10 to 12 and table 1 are drawings and definitions."""
