"""The generated parts of lab/docs/decoding.md, from `kvweave eval decode` and `kvweave bench decode`."""

from collections.abc import Iterable, Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, header, if_measured, spread
from markdown_parts import row as line
from targets import OURS, decoding_targets, over_all_kinds

from kvweave_lab.eval.decoding.results import OVERALL, budget_text

DENSE = "dense"
"""The strategy that all others are compared with."""
TRANSFERS = ("bytes", "split_bytes", "written_bytes", "moved_bytes")
"""Kinds of bytes that are moved between disk and memory for each token."""

QUALITY, ENTRIES = "decoding.json", "decoding_entries.json"
"""Results on all kinds of text, and those of the slow strategy `entries` on one kind of text."""
ABLATIONS, FAR_ABLATIONS = "decoding_ablations.json", "decoding_ablations_far.json"
"""Results with each technique left out, and results far into a text, where some techniques gain most."""
READS = ("decoding_reads_1.5b.json", "decoding_reads_0.5b.json", "decoding_reads_4k.json")
"""Strategies compared at equal bytes read, on real models' keys, the longest texts of the largest model first."""
COSTS = {
    "decode_cost_outline.json": "Memory for all KV, `outline`",
    "decode_cost.json": "Memory for 30 % of all KV, every strategy",
    "decode_cost_storages.json": "The same in fewer bits",
    "decode_cost_plenty.json": "Memory for all KV",
    "decode_cost_absolute.json": "A number of entries, and a number of bytes at every length",
    "decode_cost_limited.json": "Less memory than all KV needs",
}
"""The measurements in the shapes of real models, with their titles."""

_SHARES = "The recall that `dynakv` misses and the pages it reads, as shares of another strategy's on the same texts:"

FILES: Sequence[str] = (*READS, QUALITY, ENTRIES, ABLATIONS, FAR_ABLATIONS, *COSTS)
"""The results that `parts` needs."""


def parts(found: Mapping[str, Result | None]) -> dict[str, str]:
    """Return every part of the page by its marker, from the results by file name."""
    return {
        "decoding-reads": "\n\n".join(equal_reads(found[name]) for name in READS),
        "decoding-targets": decoding_targets(found),
        "decoding-quality": strategies(found[QUALITY]),
        "decoding-entries": beside_entries(found[ENTRIES]),
        "decoding-ablations": ablated(found[ABLATIONS]),
        "decoding-ablations-far": ablated(found[FAR_ABLATIONS]),
        "decoding-cost": costs([found[name] for name in COSTS]),
    }


@if_measured
def dense_scores(result: Result) -> str:
    """Return the scores with all KV in memory, for the card of the model for long texts."""
    dense = [row for row in result["rows"] if row["strategy"] == DENSE]
    kinds = list(dict.fromkeys(row["task"] for row in dense))
    lines = header("tokens decoded", *(f"`{kind}`" if kind != OVERALL else kind for kind in kinds))
    for length in sorted({row["decode_tokens"] for row in dense}):
        own = {row["task"]: row for row in dense if row["decode_tokens"] == length}
        lines.append(line(f"{length:,}", *(_estimate(own[kind], "score") for kind in kinds)))
    return "\n".join([*lines, "", _conditions(result)])


@if_measured
def equal_reads(result: Result) -> str:
    """Return the results of each strategy by budget."""
    about = result["about"]
    lines = header(
        *("budget", "strategy", "output error", "of the best other's", "KL", "agrees with dense"),
        *("perplexity of dense's", "recall", "read mass", "index"),
    )
    for row in result["rows"]:
        ratio = row["error_of_best"]
        lines.append(
            line(
                f"{row['budget']:.1%}",
                f"`{row['strategy']}`",
                _estimate(row, "output_error"),
                "" if ratio is None else f"{ratio:.2f}",
                *(_estimate(row, name) for name in ("kl", "agreement")),
                f"{row['perplexity_of_dense']:.3f}",
                *(_estimate(row, name) for name in ("recall", "attended_mass")),
                f"{row['index_share']:.1%}",
            )
        )
    conditions = (
        f"{len(about['texts'])} texts of {about['prompt_tokens']:,} tokens, {about['decode_tokens']} tokens decoded of each, by "
        f"{about['model']} ({about['dtype']}); 95 % intervals over texts. `{about['command']}`, {about['date']}."
    )
    return "\n".join([conditions, "", *lines])


@if_measured
def strategies(result: Result) -> str:
    """Return the results of each strategy by length and by kind of text, and how soon it retrieves clusters again."""
    rows = result["rows"]
    last = max(row["decode_tokens"] for row in rows)
    kinds = [row for row in rows if row["task"] != OVERALL and row["decode_tokens"] == last]
    return "\n\n".join(
        [
            _conditions(result),
            "\n".join(
                _strategy_rows(sorted(over_all_kinds(rows), key=lambda row: int(row["decode_tokens"])))
            ),
            _SHARES,
            "\n".join(_beside(over_all_kinds(result["beside"]))),
            f"At {last:,} tokens by kind of text:",
            "\n".join(_answers(kinds)),
            "Share of clusters that are retrieved again within N steps, among just updated clusters and among all clusters:",
            "\n".join(_returns(result)),
        ]
    )


@if_measured
def beside_entries(result: Result) -> str:
    """Return the results of the strategy `entries` by length, compared with `dynakv`."""
    return "\n\n".join(
        [
            _conditions(result),
            "\n".join(
                _strategy_rows(
                    sorted(over_all_kinds(result["rows"]), key=lambda row: int(row["decode_tokens"]))
                )
            ),
            _SHARES,
            "\n".join(_beside(over_all_kinds(result["beside"]))),
        ]
    )


@if_measured
def ablated(result: Result) -> str:
    """Return the results of every variant at the last length, and the savings of techniques at each length."""
    rows = over_all_kinds(result["rows"])
    lengths = sorted({row["decode_tokens"] for row in rows})
    at = {
        length: {row["strategy"]: row for row in rows if row["decode_tokens"] == length} for length in lengths
    }
    own = at[lengths[-1]]
    return "\n\n".join(
        [
            _conditions(result),
            "\n".join(_strategy_rows(own.values())),
            " ".join(f"At {length:,} tokens {_saved(at[length])}" for length in lengths),
            "\n".join(_moved(own.values())),
        ]
    )


def costs(measured: Sequence[Result | None]) -> str:
    """Return a table for each measurement."""
    shown = zip(COSTS.values(), measured, strict=True)
    return "\n\n".join(f"**{what}.** {_cost(result)}" for what, result in shown if result) or NOT_MEASURED


def _cost(result: Result) -> str:
    """Return a table of time and reads per token by length, budget and strategy."""
    limit = result["memory_limit_bytes"]
    lines = [
        f"{result['model']}, {result['dtype']}: medians of {result['rows'][0]['steps']} steps (smallest – largest){'' if limit is None else f', under a memory limit of {limit / 1e9:.1f} GB, page cache included'}. `{result['command']}`, "
        f"{result['machine']}, {result['threads']} threads, {result['commit']}, {result['date']}.",
        "",
        *header(
            "length",
            "strategy",
            "budget",
            "stored as",
            "per token",
            "of dense's",
            "growth of dense's",
            "reads",
            "pages",
            "read",
            "run",
            "hits",
            "memory",
            "of all KV",
        ),
    ]
    for row in result["rows"]:
        time = row["latency_s_per_token"]
        dense = row["strategy"] == DENSE
        in_memory = row["dense_kv_bytes"] if dense else row["resident_bytes"]
        lines.append(
            line(
                f"{row['decode_tokens']:,}",
                f"`{row['strategy']}`",
                "" if dense else budget_text(row["budget"]),
                "" if dense else f"`{row['storage']}`",
                f"{1e3 * time['median']:,.0f} ms ({1e3 * time['low']:,.0f} – {1e3 * time['high']:,.0f})",
                *(spread(row[name]) if row[name] else "" for name in ("of_dense", "growth_of_dense")),
                *([""] * 6 if dense else _read(row)),
                f"{in_memory / 1e6:,.1f} MB",
                f"{in_memory / row['dense_kv_bytes']:.1%}",
            )
        )
    return "\n".join(lines)


def _conditions(result: Result) -> str:
    about = result["about"]
    return (
        f"{about['texts']} texts of the `{about['split']}` split, seeds {', '.join(map(str, about['seeds']))}, decoded after a prompt of "
        f"{about['prompt_tokens']} tokens by {about['model']} ({about['dtype']}), at most {about['resident_bytes'] / 1e6:,.1f} MB of KV in memory; "
        f"95 % intervals over texts; a row's steps are those since the length before. `{about['command']}`, {about['date']}."
    )


def _strategy_rows(rows: Iterable[Result]) -> Iterable[str]:
    yield from header(
        "length",
        "strategy",
        "budget",
        "recall",
        "attended mass",
        "output error",
        "score",
        "of dense's",
        "pages",
        "reads",
        "run",
        "hits",
        "fetched ahead",
        "variance",
        "clusters",
    )
    for row in rows:
        if row["strategy"] == DENSE:
            continue
        yield line(
            f"{row['decode_tokens']:,}",
            f"`{row['strategy']}`",
            budget_text(row["budget"]),
            *(_estimate(row, name) for name in ("recall", "attended_mass", "output_error", "score")),
            _estimate(row, "score_of_dense"),
            f"{row['pages_read_per_token']:,.0f}",
            f"{row['reads_per_token']:,.0f}",
            f"{row['mean_run_entries']:.0f}",
            f"{row['hit_rate']:.0%}",
            f"{row['ahead_rate']:.0%}",
            *("" if row[name] is None else f"{row[name]:,.0f}" for name in ("cluster_variance", "clusters")),
        )


def _answers(rows: Sequence[Result]) -> Iterable[str]:
    kinds = list(dict.fromkeys(row["task"] for row in rows))
    yield from header(
        "strategy", *(f"{kind}: {what}" for kind in kinds for what in ("recall", "score", "dense"))
    )
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = {row["task"]: row for row in rows if row["strategy"] == strategy}
        yield line(
            f"`{strategy}`",
            *(_estimate(own[kind], name) for kind in kinds for name in ("recall", "score", "dense_score")),
        )


def _beside(rows: Iterable[Result]) -> Iterable[str]:
    yield from header("length", "beside", "missed recall", "pages", "reads")
    for row in sorted(rows, key=lambda row: int(row["decode_tokens"])):
        yield line(
            f"{row['decode_tokens']:,}",
            f"`{row['strategy']}`",
            *(_estimate(row, name) for name in ("missed", "pages", "reads")),
        )


def _moved(rows: Iterable[Result]) -> Iterable[str]:
    yield from header(
        "strategy", "read", "for splits", "written", "of it at another place", "in memory at most"
    )
    for row in rows:
        if row["strategy"] != DENSE:
            yield line(
                f"`{row['strategy']}`",
                *(f"{row[f'{name}_per_token'] / 1e3:,.1f} kB" for name in TRANSFERS),
                f"{row['resident_bytes'] / 1e6:,.1f} MB",
            )


def _saved(rows: Mapping[str, Result]) -> str:
    """Return a sentence on the bytes that delayed splits and pools of two clusters save."""
    sentences = []
    for name, what, action in (
        ("immediate-split", "split_bytes", "reads for splits"),
        ("immediate-split", "bytes", "reads in all"),
        ("packed", "moved_bytes", "moves"),
    ):
        other = rows.get(f"{OURS}/{name}")
        if OURS in rows and other is not None:
            own, theirs = (row[f"{what}_per_token"] for row in (rows[OURS], other))
            beside = f"{theirs / own:,.2f} times what" if own else f"{theirs / 1e3:,.1f} kB a token where"
            sentences.append(f"`{name}` {action} {beside} `{OURS}` does{'' if own else ' not'}")
    return (
        f"{'; '.join(sentences)}."
        if sentences
        else "the savings of delayed splits and pools were not measured."
    )


def _returns(result: Result) -> Iterable[str]:
    yield from header("strategy", "clusters", *map(str, result["about"]["retrieved_after_steps"]))
    for row in result["returns"]:
        for kind in ("updated", "any"):
            yield line(f"`{row['strategy']}`", kind, *(f"{share:.0%}" for share in row[kind]))


def _read(row: Result) -> Sequence[str]:
    return (
        f"{row['reads_per_token']:,.0f}",
        f"{row['pages_read_per_token']:,.0f}",
        f"{row['bytes_per_token'] / 1e6:,.2f} MB",
        f"{row['mean_run_entries']:.0f}",
        f"{row['hit_rate']:.0%}",
        f"{row['ahead_rate']:.0%}",
    )


def _estimate(row: Result, name: str) -> str:
    if row[name] is None:
        return ""
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.3f} ({low:.3f}–{high:.3f})"
