"""The generated parts of lab/docs/ttft.md, from `kvweave bench ttft`, `kvweave bench steady` and scripts of `lab/experiments/`."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_parts import NOT_MEASURED, Result, header, if_measured, row, times
from targets import ttft_targets


def limits(measured: Sequence[Result | None]) -> str:
    """Return a table for each measurement, by context, recipe and ratio, with the limit of the hardware."""
    return "\n\n".join(map(limit, filter(None, measured))) or NOT_MEASURED


def with_ranges(result: Result) -> list[tuple[Result, Result]]:
    """Return every row with the range of its speed-up over the rounds."""
    return [(one, of["speedup"]) for one, of in zip(result["rows"], result["spreads"], strict=True)]


def limit(result: Result) -> str:
    """Return the table of one measurement."""
    lines = [
        setup(result["rows"][0])
        + f", medians of {result['settings']['rounds']} rounds, in brackets the smallest and the largest. "
        + source(result),
        "",
        *header(
            "context",
            "recipe",
            "ratio",
            "rows",
            "full prefill",
            "first token",
            "speed-up",
            "limit",
            "efficiency",
        ),
    ]
    for one, speedup in with_ranges(result):
        lines.append(
            row(
                f"{one['context_tokens']:,}",
                f"`{one['recipe']}`",
                f"{one['ratio']:g}",
                f"{one['rows']:,}",
                f"{one['full_s']:.2f} s",
                f"{one['ttft_s']:.3f} s",
                times(one["speedup"], speedup["low"], speedup["high"]),
                f"{one['limit_speedup']:.2f}×",
                f"{one['efficiency']:.2f}",
            )
        )
    return "\n".join([*lines, "", *(full_prefill(one, result["rows"]) for one in result["full"])])


def full_prefill(one: Result, rows: Sequence[Result]) -> str:
    """Return the times, rates and memory of full prefill of one context."""
    ways = ", ".join(f"{name} {spread['median']:.2f} s" for name, spread in one["ways_s"].items())
    return (
        f"- {one['prompt_tokens']:,} tokens: {ways}; {one['gflops_per_s']:,.0f} GFLOP/s, memory "
        f"{one['memory_bytes_per_s'] / 1e9:.1f} GB/s, stored KV {one['read_bytes_per_s'] / 1e9:.1f} GB/s{_peaks(one, rows)}"
    )


def _peaks(one: Result, rows: Sequence[Result]) -> str:
    """Return the peaks of memory, or nothing if the system does not report them."""
    highest = [row["peak_bytes"] for row in rows if row["context_tokens"] == one["context_tokens"]]
    if None in (one["peak_bytes"], *highest):
        return ""
    return f"; memory at the peak {one['peak_bytes'] / 1e6:.0f} MB, requests' at most {max(highest) / 1e6:.0f} MB"


def lengths(measured: Sequence[Result | None]) -> str:
    """Return a table for each measurement, by context, with KV from memory and from disk."""
    return "\n\n".join(map(length, filter(None, measured))) or NOT_MEASURED


def length(result: Result) -> str:
    """Return the table of one measurement, with a row for each context, recipe and ratio."""
    rounds = result["settings"]["rounds"]
    lines = [
        setup(result["rows"][0])
        + (f", medians of {rounds} rounds. " if rounds > 1 else ", one round. ")
        + source(result),
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
    for one, speedup in with_ranges(result):
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
                    times(one["speedup"], speedup["low"], speedup["high"])
                    if rounds > 1
                    else f"{one['speedup']:.2f}×"
                    for one, speedup in placed
                ),
                *(f"{one['efficiency']:.2f}" for one, _ in placed),
            )
        )
    return "\n".join(lines)


@if_measured
def components(result: Result) -> str:
    """Return the table of variants, with KV from memory and from disk."""
    lines = [
        f"{setup(result)}, {result['context_tokens']:,} tokens in chunks of {result['chunk_tokens']:,}, ratio {result['ratio']:g}, full prefill "
        f"{result['full_s'][0]:.2f} s, medians of {result['rounds']} rounds. {source(result)}",
        "",
        *header("variant", "from", "of the FLOPs", "first token", "speed-up", "place", "select", "recompute"),
    ]
    for one in result["rows"]:
        parts = (f"{one[part]:.3f} s" for part in ("place_s", "select_s", "recompute_s"))
        lines.append(
            row(
                one["variant"].replace(" behind ", " after "),
                one["from"],
                f"{one['flops']:.1%}",
                f"{one['ttft_s'][0]:.3f} s",
                times(*one["speedup"]),
                *parts,
            )
        )
    return "\n".join(lines)


@if_measured
def offline(result: Result) -> str:
    """Return the table of the seconds that each preparation takes."""
    lines = [
        f"{setup(result)}, {result['chunks']} chunks of {result['chunk_tokens']:,} tokens at a time, medians of {result['rounds']} rounds; one pass "
        f"over a chunk and nothing else takes {result['least_s_per_chunk'][0]:.3f} s. {source(result)}",
        "",
        *header("prepared", "seconds per chunk", "of that one pass", "bytes per token"),
    ]
    for one in result["rows"]:
        seconds, low, high = one["s_per_chunk"]
        lines.append(
            row(
                one["preparation"].replace(" behind ", " after "),
                f"{seconds:.3f} ({low:.3f}–{high:.3f})",
                f"{one['of_least'][0]:.2f}×",
                f"{one['bytes_per_token']:,.0f}",
            )
        )
    return "\n".join([*lines, *(f"\nLeft out: {name} ({why})." for name, why in result["left_out"].items())])


@if_measured
def steady(result: Result) -> str:
    """Return the table of the speed-up in each quarter of the questions."""
    asked, rows = result["settings"], result["rows"]
    traffic, count = asked["traffic"], len(rows)
    limit = result["memory_limit_bytes"]
    reads = (
        f"page cache under a limit of {limit / 1e9:.1f} GB"
        if asked["page_cache"] and limit
        else "past the page cache"
    )
    lines = [
        f"{setup(result)}: {count:,} questions for {traffic['chunks_per_query']} chunks of {asked['chunk_tokens']:,} tokens each, `{asked['recipe']}` at "
        f"{asked['ratio']:g}; {rows[0]['stored_bytes'] / 1e9:.1f} to {rows[-1]['stored_bytes'] / 1e9:.1f} GB stored, at most "
        f"{asked['host_bytes'] / 1e9:.1f} GB in memory, files {reads}. The last quarter's median is **{result['kept']:.2f}** of the second's. "
        + source(result),
        "",
        *header("questions", "speed-up", "spans from memory", "stored"),
    ]
    for part, speedup in enumerate(result["quarters"]):
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


@if_measured
def peers(result: Result) -> str:
    """Return the table of other systems, with means over the drawn questions."""
    found = result["chunks_found"]
    lines = [
        f"{setup(result)}, {result['context_tokens']:,} tokens in chunks of {result['chunk_tokens']:,}, medians of {result['rounds']} rounds; a prefix cache "
        f"finds {found['prefix']:.2f} chunks of a question on average over {result['queries']:,} questions, with reordering "
        f"{found['ordered']:.2f}. {source(result)}",
        "",
        *header("way", "first token", "speed-up over full prefill"),
    ]
    lines += [row(one["way"], f"{one['ttft_s']:.3f} s", f"{one['speedup']:.2f}×") for one in result["rows"]]
    chunks = result["context_tokens"] // result["chunk_tokens"]
    whole = [
        f"{name.partition(' behind ')[0]} {median:.2f} s"
        for name, (median, _, _) in result["times"].items()
        if name.endswith(f" behind {chunks}")
    ]
    lines += ["", f"A prefix cache that finds all {chunks} chunks: {', '.join(whole)}."]
    return "\n".join([*lines, *(f"\nLeft out: {name} ({why})." for name, why in result["left_out"].items())])


def where_time_goes(measured: Sequence[Result | None]) -> str:
    """Return a table for each measurement."""
    return "\n\n".join(map(_where_time_goes, filter(None, measured))) or NOT_MEASURED


def _where_time_goes(result: Result) -> str:
    """Return the times of a request by step, by kind of work, and by operation."""
    took = result["parts"]
    named = ("match_s", "place_s", "select_s", "recompute_s")
    lines = [
        f"{setup(result)}, `{result['recipe']}` at {result['ratio']:g} over {result['context_tokens']:,} tokens, {result['rows']:,} of "
        f"{result['prompt_tokens']:,} computed: {took['ttft_s']:.3f} s, of which "
        + ", ".join(f"{part.removesuffix('_s')} {took[part]:.3f} s" for part in named)
        + f"; full prefill {result['full_s']:.2f} s. {source(result)}",
        "",
        *header("work", "TFLOP", "of full prefill's", "seconds", "GFLOP/s", "full prefill's", "at that rate"),
    ]
    for one in result["kinds"]:
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
    for one in result["operations"]:
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


@if_measured
def one_layer(result: Result) -> str:
    """Return the table of the ways to compute the rows of one layer."""
    lines = [
        f"{setup(result)}, one layer, {result['computed_rows']:,} of {result['context_tokens']:,} rows, medians of {result['rounds']} rounds; "
        f"requests get `{result['chosen']}` here. {source(result)}",
        "",
        *header(
            "way", "seconds", "faster than all rows", "than a mask", "largest difference from the mask's"
        ),
    ]
    for one in result["rows"]:
        way = one["way"] if " " in one["way"] else f"`{one['way']}`"
        of_all, of_mask = times(*one["of_all"]), times(*one["of_mask"])
        lines.append(
            row(way, f"{one['seconds'][0]:.4f}", of_all, of_mask, f"{one['largest_difference']:.1g}")
        )
    return "\n".join(lines)


def setup(one: Result) -> str:
    """Return the shape, dtype and device of a measurement."""
    return f"{one['shape']}, {one['dtype']}, {one['device']}"


def source(result: Result) -> str:
    """Return the command, machine, threads, commit and date of a result."""
    return f"`{result['command']}`, {result['machine']}, {result['threads']} threads, {result['commit']}, {result['date']}."


def parts(found: Mapping[str, Result | None]) -> dict[str, str]:
    """Return every part of the page by its marker, from the results by file name."""
    return {
        "targets": ttft_targets([found[name] for name in (*LIMITS, *LENGTHS)]),
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
"""Results by context; each context has its own file, because long ones take long."""

LENGTHS = ("ttft_lengths.json", "ttft_longest.json")
"""Results with KV from memory and disk; the longest context has its own file with fewer rounds."""

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
"""The results that `parts` needs."""
