"""The generated parts of lab/docs/serving.md: servers compared, first tokens over HTTP, shared memory, soak, tenants' timing."""

from collections.abc import Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, between, if_measured, table

SERVE, SOAK, TIMING = "serve.json", "soak.json", "tenant_timing.json"
FAST, FIRST_TOKEN, MEMORY = "serve_bfloat16.json", "serve_first_token.json", "serve_memory.json"
"""Also written by `kvweave bench serve`: the load in bfloat16, and one part alone each."""
OWN_RATES, SLOW_DISK = "serve_own_rates.json", "serve_slow_disk.json"
"""Also: each system at rates that it can serve, and KV on a simulated slow disk."""
CALLERS, EARLIER = "caller_chunks.json", ("earlier_prompts_qwen.json", "earlier_prompts_gemma.json")
"""Documents that callers bring: what is reused, and how good the KV is that earlier prompts left."""
FILES = (SERVE, FAST, OWN_RATES, SLOW_DISK, FIRST_TOKEN, MEMORY, SOAK, TIMING, CALLERS, *EARLIER)

OUTCOME_COLUMNS = ("requests/s", "system", "answered", "refused", "failed", "served/s", "tokens/s")
LLAMA = "llama-server"
GAP_COLUMN = "longest gap p50, p95, max"
OUTCOMES = ("answered", "refused", "stopped", "left", "interrupted", "failed")


def parts(results: Mapping[str, Result | None]) -> dict[str, str]:
    """Return the page's parts by the names of their markers."""
    serve, fast, own = (results[name] or {} for name in (SERVE, FAST, OWN_RATES))
    return {
        "throughput": throughput(serve),
        "equal": equal(serve),
        "throughput-fast": throughput(fast),
        "equal-fast": equal(fast),
        "throughput-own": throughput(own),
        "equal-own": equal(own),
        "throughput-slow": throughput(results[SLOW_DISK] or {}),
        "first-token": first_token(results[FIRST_TOKEN] or {}),
        "shared-memory": shared_memory(results[MEMORY] or {}),
        "soak": soak(results[SOAK]),
        "tenants": tenants(results[TIMING]),
        "callers": callers(results[CALLERS]),
        "earlier": earlier([found for name in EARLIER if (found := results[name])]),
    }


def throughput(result: Result) -> str:
    """Return a table with a row for each request rate and system."""
    measured = result.get("throughput")
    if not measured:
        return NOT_MEASURED
    asked, phases = measured["settings"]["traffic"], measured["phases"]
    shares, gaps = [one["prefix_share"] for one in phases], any(one.get("gap") for one in phases)
    rows = [
        [
            f"{one['rate']:g}",
            f"`{one['system']}`",
            f"{one['answered']:,}",
            f"{one['refused']:,}",
            f"{one['failed']:,}",
            f"{one['requests_per_s']:.3f}",
            f"{one['tokens_per_s']:.1f}",
            _three(one["ttft"], 1, " s"),
            _three(one["tpot"], 1000, " ms"),
            *([_gap(one.get("gap"))] if gaps else []),
            f"{one['cached_tokens'] / max(1, one['prompt_tokens']):.0%}",
            f"{one['peak_bytes'] / 1e6:,.0f} MB",
        ]
        for one in phases
    ]
    disk = measured["settings"].get("common", {}).get("disk_bytes_per_s")
    return "\n".join(
        [
            f"{measured['model']}: {asked['per_request']} of {asked['documents']:,} documents of {asked['document_tokens']:,} tokens in "
            f"each request, popularity n^-{asked['exponent']:g}, {asked['shuffled']:.0%} in random order, at most "
            f"{asked['new_tokens']} tokens of answer, greedy; {measured['settings']['requests']} Poisson arrivals a rate. Every "
            f"document's KV was stored before; a prefix cache without limit would find {sum(shares) / len(shares):.1%} of the documents."
            + (
                f" kvweave's servers read stored KV from a simulated disk of {disk / 1e6:,.0f} MB/s."
                if disk
                else ""
            ),
            "",
            *table(
                [
                    *(*OUTCOME_COLUMNS, "TTFT p50, p95, p99", "TPOT p50, p95, p99"),
                    *([GAP_COLUMN] if gaps else []),
                    *("cached", "most memory"),
                ],
                rows,
            ),
            "",
            _source(result),
        ]
    )


def equal(result: Result) -> str:
    """Return a table of the requests per second that each system serves at the same p95 TTFT."""
    measured = result.get("throughput")
    if not measured or not measured["equal"]:
        return NOT_MEASURED
    llama = {
        one["ttft_s"]: one["requests_per_s"]
        for one in measured["equal"]
        if one["system"] == LLAMA and one["requests_per_s"]
    }
    rows = [
        [
            f"{one['ttft_s']:.2f} s",
            f"`{one['system']}`",
            "–" if one["requests_per_s"] is None else f"{'≥ ' * one['at_least']}{one['requests_per_s']:.3f}",
            "–" if one["of_baseline"] is None else f"{one['of_baseline']:.2f}×",
            *([_ratio(one["requests_per_s"], llama.get(one["ttft_s"]))] if llama else []),
        ]
        for one in measured["equal"]
    ]
    of_llama = [f"of `{LLAMA}`"] if llama else []
    return "\n".join(table(["p95 TTFT", "system", "requests/s", "of `prefix`", *of_llama], rows))


def _ratio(served: float | None, other: float | None) -> str:
    return f"{served / other:.2f}×" if served and other else "–"


def first_token(result: Result) -> str:
    """Return a table of the time that HTTP adds to the first token."""
    measured = result.get("first_token")
    if not measured:
        return NOT_MEASURED
    rows = [
        [name, *(f"{1000 * measured[part][value]:.1f} ms" for value in ("median", "low", "high"))]
        for name, part in (
            ("through HTTP", "http_s"),
            ("in process", "in_process_s"),
            ("HTTP adds", "added_s"),
        )
    ]
    lines = table(["first token", "median", "smallest", "largest"], rows)
    return "\n".join(
        [
            *lines,
            "",
            f"{measured['rounds']} requests of up to {measured['prompt_tokens']:,} tokens, everything stored. {_source(result)}",
        ]
    )


def shared_memory(result: Result) -> str:
    """Return a table of the memory that requests over the same documents add to a server's process."""
    measured = result.get("memory")
    if not measured:
        return NOT_MEASURED
    private = measured[-1]["all_bytes"]
    rows = [
        [
            f"`{one['system']}`",
            f"{one['requests']}",
            f"{one['together']}",
            f"{one['one_bytes'] / 1e6:,.1f} MB",
            f"{one['all_bytes'] / 1e6:,.1f} MB",
            f"{one['all_bytes'] / private:.2f}",
        ]
        for one in measured
    ]
    lines = table(
        ["", "requests", "decoded at one moment", "memory of one", "memory of all", "of private copies"], rows
    )
    return "\n".join([*lines, "", f"{measured[0]['prompt_tokens']:,} tokens each. {_source(result)}"])


@if_measured
def soak(result: Result) -> str:
    """Return the outcomes of the requests, the memory and the problems of the soak test."""
    asked, outcomes = result["settings"], result["outcomes"]
    rows = [
        [action, *_counts([counts]), _wait(result["waits"].get(action))]
        for action, counts in outcomes.items()
    ]
    rows.append(["all", *_counts(list(outcomes.values())), ""])
    checked = [one["damage"]["checked"] for one in result["restarts"]] + [result["damage"]["checked"]]
    lines = [
        f"{asked['users']} users for {asked['seconds'] / 60:g} minutes, then {asked['kills']} times killed and started again under load, "
        "then SIGTERM under load.",
        "",
        *table(["requests", *OUTCOMES, "median, p95, longest wait"], rows),
        "",
        f"Entries verified after each end: {', '.join(f'{count:,}' for count in checked)}.",
        "",
        *_memory(result["memory"]),
        "",
        *(f"- {problem}" for problem in result["problems"]),
        "" if result["problems"] else "No problem was found.",
        "",
        _source(result),
    ]
    return "\n".join(lines)


@if_measured
def tenants(result: Result) -> str:
    """Return a table of how well an attacker can tell cached texts by the time to the first token."""
    names = {"other": "another tenant", "attacker": "the attacker itself (control)"}
    rows = [
        [
            one["way"],
            names[one["before"]],
            f"{min(one['probes']):,}",
            between(one["auc"], *one["interval"]),
            *(f"{1000 * seconds:.1f} ms" for seconds in one["median_s"]),
        ]
        for one in sorted(result["rows"], key=lambda one: (one["way"], one["before"] == "attacker"))
    ]
    lines = table(
        ["sent as", "who had sent it before", "probes a side", "AUC", "median, cached", "median, not cached"],
        rows,
    )
    return "\n".join(
        [*lines, "", f"{result['model']}, texts of {result['tokens']:,} tokens. {_source(result)}"]
    )


@if_measured
def callers(result: Result) -> str:
    """Return a table of what the server reused of callers' documents, in the order of the requests."""
    groups = {
        f"{50 * number + 1}–{50 * number + each['requests']}": each
        for number, each in enumerate(result["by 50 requests"])
    }
    seen = result["requests whose documents were all seen twice before"]
    groups |= {"all": result["all"], "all documents seen twice before": seen}
    rows = [
        [
            name,
            f"{each['requests']}",
            *(
                f"{each['weave'].get(origin, 0):.0%}"
                for origin in ("found", "exact", "prepared", "left", "recomputed")
            ),
            f"{each['prefix']['found']:.0%}",
            f"{each['weave']['ttft_s']:.2f} s, {each['prefix']['ttft_s']:.2f} s",
            between(each["ttft_ratio"], *each["ttft_ratio_quartiles"], digits=2),
            f"{each['same_first_token']:.0%}",
        ]
        for name, each in groups.items()
        if each["requests"]
    ]
    of_weave = ("found", "exact", "prepared", "left", "recomputed")
    names = [
        "requests",
        "n",
        *of_weave,
        "`prefix` finds",
        "TTFT: weave, prefix",
        "ratio (quartiles)",
        "same first token",
    ]
    return "\n".join([*table(names, rows), "", f"{result['model']}. {_source(result)}"])


def earlier(found: Sequence[Result]) -> str:
    """Return a table of how far answers are from full attention's, by the KV of the chunks."""
    if not found:
        return NOT_MEASURED
    rows = [
        [
            result["model"],
            each["kv"],
            f"{each['ratio']:g}",
            f"{each['prompts']}",
            f"{each['kl']:.3f}",
            f"{each['same_first']:.0%}",
            f"{each['nll'] - each['nll_full']:+.3f}",
        ]
        for result in found
        for each in result["rows"]
    ]
    names = [
        "model",
        "KV of the chunks",
        "recomputed",
        "prompts",
        "KL",
        "same first token",
        "NLL above full attention",
    ]
    return "\n".join(
        [*table(names, rows), "", *(f"{result['model']}: {_source(result)}" for result in found)]
    )


def _memory(memory: Result | None) -> list[str]:
    """Return a table with a row for each measure of memory and its growth after the warm-up."""
    if memory is None:
        return ["Memory was not sampled for long enough."]
    rows = [
        [
            name,
            f"{trend['first_bytes'] / 1e6:,.0f} MB",
            f"{trend['last_bytes'] / 1e6:,.0f} MB",
            f"{trend['growth']:+.1%}",
            f"{trend['slope_bytes_per_minute'] / 1e6:+.2f} MB",
            f"{trend['peak_bytes'] / 1e6:,.0f} MB",
            ", ".join(f"{size / 1e6:,.0f}" for _, size in trend["points"]) or "–",
        ]
        for name, trend in memory.items()
        if trend is not None
    ]
    columns = (
        "memory",
        "after the warm-up",
        "at the end",
        "growth",
        "a minute",
        "at most",
        "in ten parts, MB",
    )
    return table(columns, rows)


def _wait(waits: Result | None) -> str:
    if waits is None:
        return ""
    return ", ".join(f"{waits[name]:.1f}" for name in ("median_s", "p95_s", "longest_s")) + " s"


def _counts(rows: Sequence[Mapping[str, int]]) -> list[str]:
    return [f"{sum(row.get(outcome, 0) for row in rows):,}" for outcome in OUTCOMES]


def _three(found: Result | None, scale: float, unit: str) -> str:
    if found is None:
        return "–"
    return ", ".join(f"{scale * found[name]:.2f}" for name in ("p50", "p95", "p99")) + unit


def _gap(found: Result | None) -> str:
    if found is None:
        return "–"
    return ", ".join(f"{found[name]:.2f}" for name in ("p50", "p95", "longest")) + " s"


def _source(result: Result) -> str:
    return f"`{result['command']}`, {result['date']}, {result['commit']}, {result['machine']}, {result['threads']} threads."
