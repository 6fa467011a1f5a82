"""The generated parts of lab/docs/ttft.md: what `kvweave bench ttft`, `bench steady` and the scripts beside them measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED, header, row
from ttft_targets import targets

from kvweave_lab.eval.summary import OVERALL

Result = Mapping[str, Any]


def headline(measured: Sequence[Result], scored: Result | None, recipe: str, ratio: float) -> str:
    """For README: how soon one recipe has a first token at the shortest context, and what its answers score."""
    chosen = [
        (one, speedup, told)
        for told in measured
        for one, speedup in with_ranges(told)
        if (one["recipe"], one["ratio"]) == (recipe, ratio)
    ]
    if not chosen:
        return NOT_MEASURED
    (one, speedup, told), *others = chosen
    further = " and ".join(f"{more['speedup']:.1f}× at {more['context_tokens']:,}" for more, _, _ in others)
    in_8_bits = [
        f"{row['speedup']:.1f}× at {row['context_tokens']:,}"
        for told in measured
        for row in told["rows"]
        if (row["recipe"].endswith(f"int8+{recipe}"), row["ratio"]) == (True, ratio)
    ]
    stored = (
        f"; as `kvweave add` stores it by default, in 8 bits, {' and '.join(in_8_bits)}" if in_8_bits else ""
    )
    units = "" if "AMX" in told["machine"] else " without matrix units"
    return (
        f"**{one['speedup']:.1f}× faster to the first token** ({speedup['low']:.1f}–{speedup['high']:.1f}× over {told['settings']['rounds']} interleaved "
        f"rounds): {one['ttft_s']:.1f} s instead of {one['full_s']:.1f} s over {one['context_tokens']:,} tokens of stored chunks, with {ratio:.0%} "
        f"recomputed of what stands behind the first chunk (`{recipe}`, the default recipe){f'; {further} tokens' if further else ''}. The shape of {one['shape']}, "
        f"{one['dtype']}, random weights, {told['threads']} {one['device'].upper()} threads{units}, chunk KV in memory and exact{stored}; the baseline, timed beside every "
        "request, is the fastest of transformers' own prefill, the same in blocks, and ours without reuse ([commands, other "
        f"recipes and ratios](lab/docs/ttft.md)).{_worth(scored, recipe, ratio)}"
    )


def _worth(scored: Result | None, recipe: str, ratio: float) -> str:
    """A sentence about answers over all tasks."""
    rows = [] if scored is None else scored["rows"]
    tasks = len({one["task"] for one in rows} - {OVERALL})
    for one in rows:
        if (one["task"], one["recipe"], one["ratio"]) == (OVERALL, recipe, ratio):
            low, high = one["score_interval"]
            return (
                f"\n\nAnswers made so score {one['score']:.3f} ({low:.3f}–{high:.3f}), full attention's {one['full_score']:.3f}, plain reuse's "
                f"{one['reuse_score']:.3f}: the mean over {tasks} tasks with {one['samples']:,} prompts of {one['context_tokens']:,} tokens ({scored['date']}) on the "
                "[small model](src/kvweave/models/reference/README.md) that ships with kvweave ([every recipe, and what favours "
                "this one](lab/docs/methods.md)). At the lengths timed here it was not measured."
            )
    return ""


def limits(measured: Sequence[Result | None]) -> str:
    """By context, recipe and ratio, beside the limit; a table for each measurement."""
    return "\n\n".join(map(limit, filter(None, measured))) or NOT_MEASURED


def with_ranges(told: Result) -> list[tuple[Result, Result]]:
    """Every row, and the smallest and the largest speed-up over its rounds."""
    return [(one, of["speedup"]) for one, of in zip(told["rows"], told["spreads"], strict=True)]


def limit(told: Result) -> str:
    """One measurement's table."""
    lines = [
        where(told["rows"][0])
        + f", medians of {told['settings']['rounds']} rounds, in brackets the smallest and the largest. "
        + said(told),
        "",
        *header(
            "context",
            "recipe",
            "ratio",
            "rows",
            "full prefill",
            "first token",
            "speed-up",
            "at best",
            "efficiency",
        ),
    ]
    for one, speedup in with_ranges(told):
        lines.append(
            row(
                f"{one['context_tokens']:,}",
                f"`{one['recipe']}`",
                f"{one['ratio']:g}",
                f"{one['rows']:,}",
                f"{one['full_s']:.2f} s",
                f"{one['ttft_s']:.3f} s",
                f"{one['speedup']:.2f}× ({speedup['low']:.2f}–{speedup['high']:.2f})",
                f"{one['limit_speedup']:.2f}×",
                f"{one['efficiency']:.2f}",
            )
        )
    return "\n".join([*lines, "", *(full_prefill(one, told["rows"]) for one in told["full"])])


def full_prefill(one: Result, rows: Sequence[Result]) -> str:
    """What the rows of one context are compared with, and what memory both take."""
    ways = ", ".join(f"{name} {spread['median']:.2f} s" for name, spread in one["ways_s"].items())
    return (
        f"- {one['prompt_tokens']:,} tokens: {ways}; {one['gflops_per_s']:,.0f} GFLOP/s, memory "
        f"{one['memory_bytes_per_s'] / 1e9:.1f} GB/s, stored KV {one['read_bytes_per_s'] / 1e9:.1f} GB/s{_peaks(one, rows)}"
    )


def _peaks(one: Result, rows: Sequence[Result]) -> str:
    """Nothing where the system tells of no peak."""
    highest = [row["peak_bytes"] for row in rows if row["context_tokens"] == one["context_tokens"]]
    if None in (one["peak_bytes"], *highest):
        return ""
    return f"; memory at the peak {one['peak_bytes'] / 1e6:.0f} MB, requests' at most {max(highest) / 1e6:.0f} MB"


def lengths(measured: Sequence[Result | None]) -> str:
    """By context, each request from memory and from the disk; a table for each measurement."""
    return "\n\n".join(map(length, filter(None, measured))) or NOT_MEASURED


def length(told: Result) -> str:
    """One measurement's table: a line for each recipe at each ratio over each context."""
    rounds = told["settings"]["rounds"]
    lines = [
        where(told["rows"][0])
        + (f", medians of {rounds} rounds. " if rounds > 1 else ", one round. ")
        + said(told),
        "",
        *header(
            "context",
            "recipe",
            "ratio",
            "full prefill",
            "from memory",
            "from the disk",
            "speed-up",
            "from the disk",
            "efficiency",
            "from the disk",
        ),
    ]
    by_case: dict[tuple[Any, ...], dict[str, tuple[Result, Result]]] = {}
    for one, speedup in with_ranges(told):
        case = (one["context_tokens"], one["recipe"], one["ratio"], one["full_s"])
        by_case.setdefault(case, {})[one["kv_from"]] = one, speedup
    for (context_tokens, recipe, ratio, full_s), both in by_case.items():
        placed = [both["memory"], both["disk"]]
        lines.append(
            row(
                f"{context_tokens:,}",
                f"`{recipe}`",
                f"{ratio:g}",
                f"{full_s:.2f} s",
                *(f"{one['ttft_s']:.3f} s" for one, _ in placed),
                *(
                    f"{one['speedup']:.2f}×"
                    + (f" ({speedup['low']:.2f}–{speedup['high']:.2f})" if rounds > 1 else "")
                    for one, speedup in placed
                ),
                *(f"{one['efficiency']:.2f}" for one, _ in placed),
            )
        )
    return "\n".join(lines)


def components(told: Result | None) -> str:
    """Each variant, from memory and from the disk."""
    if told is None:
        return NOT_MEASURED
    lines = [
        f"{where(told)}, {told['context_tokens']:,} tokens in chunks of {told['chunk_tokens']:,}, ratio {told['ratio']:g}, full prefill "
        f"{told['full_s'][0]:.2f} s, medians of {told['rounds']} rounds. {said(told)}",
        "",
        *header("variant", "from", "of the FLOPs", "first token", "speed-up", "place", "select", "recompute"),
    ]
    for one in told["rows"]:
        speedup, low, high = one["speedup"]
        parts = (f"{one[part]:.3f} s" for part in ("place_s", "select_s", "recompute_s"))
        lines.append(
            row(
                one["variant"],
                one["from"],
                f"{one['flops']:.1%}",
                f"{one['ttft_s'][0]:.3f} s",
                f"{speedup:.2f}× ({low:.2f}–{high:.2f})",
                *parts,
            )
        )
    return "\n".join(lines)


def offline(told: Result | None) -> str:
    """Each preparation's seconds."""
    if told is None:
        return NOT_MEASURED
    lines = [
        f"{where(told)}, {told['chunks']} chunks of {told['chunk_tokens']:,} tokens at a time, medians of {told['rounds']} rounds; one pass "
        f"over a chunk and nothing else takes {told['least_s_per_chunk'][0]:.3f} s. {said(told)}",
        "",
        *header("prepared", "seconds per chunk", "of that one pass", "bytes per token"),
    ]
    for one in told["rows"]:
        seconds, low, high = one["s_per_chunk"]
        lines.append(
            row(
                one["preparation"],
                f"{seconds:.3f} ({low:.3f}–{high:.3f})",
                f"{one['of_least'][0]:.2f}×",
                f"{one['bytes_per_token']:,.0f}",
            )
        )
    return "\n".join([*lines, *(f"\nLeft out: {name} ({why})." for name, why in told["left_out"].items())])


def steady(told: Result | None) -> str:
    """By quarter of the questions."""
    if told is None:
        return NOT_MEASURED
    asked, rows = told["settings"], told["rows"]
    traffic, count = asked["traffic"], len(rows)
    limit = told["memory_limit_bytes"]
    reads = (
        f"page cache under a limit of {limit / 1e9:.1f} GB"
        if asked["page_cache"] and limit
        else "past the page cache"
    )
    lines = [
        f"{where(told)}: {count:,} questions for {traffic['chunks_per_query']} chunks of {asked['chunk_tokens']:,} tokens each, `{asked['recipe']}` at "
        f"{asked['ratio']:g}; {rows[0]['stored_bytes'] / 1e9:.1f} to {rows[-1]['stored_bytes'] / 1e9:.1f} GB stored, at most "
        f"{asked['host_bytes'] / 1e9:.1f} GB in memory, files {reads}. The last quarter's median is **{told['kept']:.2f}** of the second's. "
        + said(told),
        "",
        *header("questions", "speed-up", "spans from memory", "stored"),
    ]
    for part, speedup in enumerate(told["quarters"]):
        own = rows[round(part * count / 4) : round((part + 1) * count / 4)]
        spans = sum(one["from_host"] + one["from_disk"] for one in own)
        lines.append(
            row(
                f"{own[0]['question'] + 1}–{own[-1]['question'] + 1}",
                f"{speedup:.2f}×",
                f"{sum(one['from_host'] for one in own) / max(1, spans):.0%}",
                f"{own[-1]['stored_bytes'] / 1e9:.1f} GB",
            )
        )
    return "\n".join(lines)


def peers(told: Result | None) -> str:
    """Each way's mean over the drawn questions."""
    if told is None:
        return NOT_MEASURED
    found = told["chunks_found"]
    lines = [
        f"{where(told)}, {told['context_tokens']:,} tokens in chunks of {told['chunk_tokens']:,}, medians of {told['rounds']} rounds; a prefix cache "
        f"finds {found['prefix']:.2f} chunks of a question on the mean over {told['queries']:,} questions, with reordering "
        f"{found['ordered']:.2f}. {said(told)}",
        "",
        *header("way", "first token", "speed-up over full prefill"),
    ]
    lines += [row(one["way"], f"{one['ttft_s']:.3f} s", f"{one['speedup']:.2f}×") for one in told["rows"]]
    chunks = told["context_tokens"] // told["chunk_tokens"]
    whole = [
        f"{name.partition(' behind ')[0]} {median:.2f} s"
        for name, (median, _, _) in told["times"].items()
        if name.endswith(f" behind {chunks}")
    ]
    lines += ["", f"A prefix cache that finds all {chunks} chunks: {', '.join(whole)}."]
    return "\n".join([*lines, *(f"\nLeft out: {name} ({why})." for name, why in told["left_out"].items())])


def where_time_goes(measured: Sequence[Result | None]) -> str:
    """A table for each measurement."""
    return "\n\n".join(map(_where_time_goes, filter(None, measured))) or NOT_MEASURED


def _where_time_goes(told: Result) -> str:
    """A request's parts, its kinds of work, and the operations that take longest."""
    took = told["parts"]
    named = ("match_s", "place_s", "select_s", "recompute_s")
    lines = [
        f"{where(told)}, `{told['recipe']}` at {told['ratio']:g} over {told['context_tokens']:,} tokens, {told['rows']:,} of "
        f"{told['prompt_tokens']:,} computed: {took['ttft_s']:.3f} s, of which "
        + ", ".join(f"{part.removesuffix('_s')} {took[part]:.3f} s" for part in named)
        + f"; full prefill {told['full_s']:.2f} s. {said(told)}",
        "",
        *header("work", "TFLOP", "of full prefill's", "seconds", "GFLOP/s", "full prefill's", "at that rate"),
    ]
    for one in told["kinds"]:
        rate, full_rate = one["flops"] / one["seconds"], one["full_flops"] / one["full_seconds"]
        lines.append(
            row(
                one["kind"],
                f"{one['flops'] / 1e12:.3f}",
                f"{one['flops'] / one['full_flops']:.1%}",
                f"{one['seconds']:.3f}",
                f"{rate / 1e9:,.0f}",
                f"{full_rate / 1e9:,.0f}",
                f"{one['flops'] / full_rate:.3f} s",
            )
        )
    lines += [
        "",
        *header("operation", "seconds", "share", "calls", "in full prefill", "more than its share of that"),
    ]
    for one in told["operations"]:
        lines.append(
            row(
                f"`{one['operation']}`",
                f"{one['seconds']:.3f}",
                f"{one['share']:.0%}",
                f"{one['calls']:,.0f}",
                f"{one['full_seconds']:.3f}",
                f"{one['wasted_s']:+.3f}",
            )
        )
    return "\n".join(lines)


def one_layer(told: Result | None) -> str:
    """Each way of computing the rows."""
    if told is None:
        return NOT_MEASURED
    lines = [
        f"{where(told)}, one layer, {told['computed_rows']:,} of {told['context_tokens']:,} rows, medians of {told['rounds']} rounds; "
        f"requests get `{told['chosen']}` here. {said(told)}",
        "",
        *header(
            "way", "seconds", "faster than all rows", "than a mask", "largest difference from the mask's"
        ),
    ]
    for one in told["rows"]:
        way = one["way"] if " " in one["way"] else f"`{one['way']}`"
        of_all, of_mask = (
            f"{part[0]:.2f}× ({part[1]:.2f}–{part[2]:.2f})" for part in (one["of_all"], one["of_mask"])
        )
        lines.append(
            row(way, f"{one['seconds'][0]:.4f}", of_all, of_mask, f"{one['largest_difference']:.1g}")
        )
    return "\n".join(lines)


def where(one: Result) -> str:
    """What ran."""
    return f"{one['shape']}, {one['dtype']}, {one['device']}"


def said(told: Result) -> str:
    """How it came about."""
    return f"`{told['command']}`, {told['machine']}, {told['threads']} threads, {told['commit']}, {told['date']}."


def parts(found: Mapping[str, Result | None]) -> dict[str, str]:
    """Every part of the page by its marker; `found` are results by file name, None where there are none."""
    return {
        "targets": targets([found[name] for name in (*LIMITS, *LENGTHS)]),
        "limits": limits([found[name] for name in LIMITS]),
        "lengths": lengths([found[name] for name in LENGTHS]),
        "components": components(found["components.json"]),
        "offline": offline(found["offline.json"]),
        "steady": steady(found["steady.json"]),
        "peers": peers(found["peers.json"]),
        "one-layer": one_layer(found["row_attention.json"]),
        "where-time-goes": where_time_goes([found[name] for name in PROFILES]),
    }


LIMITS = ("ttft_limit_4k.json", "ttft_limit_8k.json", "ttft_limit_16k.json")
"""Measured one by one, as long contexts take long."""

LENGTHS = ("ttft_lengths.json", "ttft_longest.json")
"""The longest apart from the others, in fewer rounds."""

PROFILES = ("where_time_goes.json", "where_time_goes_8k.json")

FILES: Sequence[str] = (
    *LIMITS,
    *LENGTHS,
    *PROFILES,
    "components.json",
    "offline.json",
    "steady.json",
    "peers.json",
    "row_attention.json",
)
"""What `parts` is told of."""
