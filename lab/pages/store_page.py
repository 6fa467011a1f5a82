"""The generated parts of lab/docs/store.md: measurements of the store, and the counts of `kvweave bench reuse`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_parts import NOT_MEASURED, Result, if_measured, table

MOST_LOST = 0.005
"""The largest loss of any recipe's mean score that is accepted, at the upper end of the 95 % interval."""

FEWEST_PROMPTS = 2000
"""The number of prompts that this loss must be measured on."""


SIZES_IMAGE = "store-size.png"
_COSTS = {
    "add": lambda row: row["add_s"]["median"],
    "add when full: one is evicted": lambda row: row["add_evicting_s"]["median"],
    "look up 8": lambda row: row["find_s"]["median"],
    "look up 8, none there": lambda row: row["miss_s"]["median"],
    "open, and count": lambda row: row["start_s"]["median"],
    "verify everything": lambda row: row["verify_s"],
}
"""What a store of each size costs, in seconds."""


def chosen_storage(costs: Sequence[Result]) -> str:
    """Return the default storage that follows from the measurements: the fewest bits with a small loss for every recipe."""
    for storage in ("int4", "int8"):
        counted = [cost for cost in costs if cost["storage"] == storage and cost["samples"] >= FEWEST_PROMPTS]
        if counted and all(cost["lost_interval"][1] <= MOST_LOST for cost in counted):
            return storage
    return "exact"


def fewer_bits(result: Result | None) -> str:
    """Return a table with a row for each length, recipe, budget and storage, and the default storage."""
    if result is None or not result["storages"]:
        return NOT_MEASURED
    lines = [
        f"The table has the mean score over the tasks of the `{result['split']}` split and the loss on the same prompts, with 95 % intervals. "
        f"*Same* is the share of equal answers ({result['model']}, {result['dtype']}, {result['device']}).",
        "",
        *table(
            ["context", "recipe", "budget", "stored as", "prompts", "exact", "in fewer bits", "lost", "same"],
            (
                [
                    f"{cost['context_tokens']:,}",
                    f"`{cost['recipe']}`",
                    f"{cost['ratio']:g}" if cost["coverage"] is None else f"coverage {cost['coverage']:g}",
                    f"`{cost['storage']}`",
                    f"{cost['samples']:,}",
                    f"{cost['exact_score']:.3f}",
                    f"{cost['score']:.3f}",
                    "{:+.4f} ({:+.4f} – {:+.4f})".format(cost["lost"], *cost["lost_interval"]),
                    f"{cost['same']:.3f}",
                ]
                for cost in result["storages"]
            ),
        ),
        "",
        f"So the default is `{chosen_storage(result['storages'])}`. "
        f"{'; '.join(f'`{command}`' for command in result['evaluations'])}; `{result['command']}`, {result['date']}.",
    ]
    return "\n".join(lines)


@if_measured
def sizes(result: Result) -> str:
    """Return the figure and the table of a store's cost by its number of entries."""
    rows = result["rows"]
    lines = table(
        ["", *(f"{row['entries']:,} entries" for row in rows)],
        [
            *([name, *(_short(cost(row)) for row in rows)] for name, cost in _COSTS.items()),
            *(
                [f"{name}, 99 % within", *(_short(row[part]["p99"]) for row in rows)]
                for name, part in (("add", "add_s"), ("look up 8", "find_s"))
            ),
            ["evict one of the hundredth that goes together", *(_short(_evicted_s(row)) for row in rows)],
            [
                "catalogue, per entry",
                *(f"{row['catalogue_bytes'] / row['entries']:,.0f} bytes" for row in rows),
            ],
        ],
    )
    about = f"`.venv/bin/python lab/experiments/store_size.py`, {result['date']}, {result['commit']}, {result['machine']}, one thread."
    return "\n".join([f"![cost by size](images/{SIZES_IMAGE})", "", *lines, "", about])


def draw_sizes(result: Result, folder: Path) -> None:
    """Draw the cost of a store by its number of entries."""
    from kvweave_lab.report.figures import (
        LIGHT,
        add_series_legend,
        line_properties,
        new_figure,
        render,
        styles_of,
    )

    def figure(theme: Any) -> Any:
        drawn = new_figure(7.2, 4.2, "What a store costs as it grows", "medians, one thread", theme)
        styles, axes = styles_of(list(_COSTS), theme), drawn.add_subplot()
        for name, cost in _COSTS.items():
            points = [(row["entries"], cost(row)) for row in result["rows"]]
            axes.plot(*zip(*points, strict=True), **line_properties(styles[name], theme))
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("log")
            axis.set_major_formatter(lambda value, place: f"{value:,.6g}")
        axes.set_xlabel("entries")
        axes.set_ylabel("seconds")
        add_series_legend(drawn, styles, theme)
        return drawn

    (folder / SIZES_IMAGE).write_bytes(render(figure, LIGHT))


def _evicted_s(row: Result) -> float:
    return row["evict_s"] / max(1, row["evicted"])


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@if_measured
def loaded(result: Result) -> str:
    """Return the table of `kvweave bench store`, with a column for each storage."""
    full = f", whose full prefill takes {result['full_s']['median']:.1f} s" if result["full_s"] else ""
    each = result["storages"]
    rows = [["size", *(f"{one['bytes'] / 1e6:.1f} MB" for one in each)]]
    for name, part, form in (
        ("cold: plain read", "plain_cold_s", ms),
        ("cold: looked up, mapped, verified", "cold_s", ms),
        ("… until the first layers can be used", "first_layer_s", ms),
        ("… throughput, of the plain read's", "cold_throughput", times),
        ("warm: plain read of the mapped files", "plain_warm_s", ms),
        ("warm: looked up, mapped, verified", "warm_s", ms),
        ("… time, of the plain read's", "warm_slowdown", times),
        ("placed in a prompt", "place_s", ms),
        ("cold and placed, of full prefill", "of_prefill", percent),
    ):
        values = [one[part] for one in each]
        if all(values):
            spreads = [[value["median"], value["low"], value["high"]] for value in values]
            rows.append([name, *(form(spread) for spread in spreads)])
    found = result.get("catalog")
    looked_up = found and [
        f"One look-up of {found['spans']} entries in a catalogue of {found['entries']:,} takes "
        f"{1e3 * found['look_up_s']['median']:.2f} ms ({1e3 * found['look_up_s']['low']:.2f} – "
        f"{1e3 * found['look_up_s']['high']:.2f}), the median of {found['look_ups']:,}.",
        "",
    ]
    return "\n".join(
        [
            f"{result['context_tokens']:,} tokens in entries of {result['chunk_tokens']:,}, in the shape of {result['model']} "
            f"({result['dtype']}){full}: medians of {result['rounds']} rounds (smallest – largest).",
            "",
            *table(["", *(f"`{one['storage']}`" for one in each)], rows),
            "",
            *(looked_up or []),
            f"`{result['command']}`, {result['date']}, {result['commit']}, {result['machine']}, {result['threads']} threads.",
        ]
    )


@if_measured
def fetched(result: Result) -> str:
    """Return the table of `lab/experiments/tiers.py`, with a row for each tier and storage."""
    by_layers = any("first_layer_s" in one for one in result["tiers"])
    rows = [
        [
            f"`{one['tier']}`",
            f"`{one['storage']}`",
            f"{one['bytes'] / 1e6:.1f} MB",
            f"{one['bytes'] / 1e6 / one['plain_s'][0]:,.0f} MB/s",
            f"{one['bytes'] / 1e6 / one['fetch_s'][0]:,.0f} MB/s",
            times(one["throughput_of_plain"]),
            *([_layers_first(one)] if by_layers else []),
        ]
        for one in result["tiers"]
    ]
    return "\n".join(
        [
            *table(
                ["tier", "stored as", "size", "plain transfer", "fetched and verified", "of the plain one"]
                + ["all looked up at once: until the first layers can be used, and all"] * by_layers,
                rows,
            ),
            "",
            f"`{result['command']}`, {result['date']}, {result['commit']}, {result['machine']}, {result['threads']} threads.",
        ]
    )


def _layers_first(one: Result) -> str:
    if "first_layer_s" not in one:
        return "–"
    return f"{1e3 * one['first_layer_s'][0]:.1f} ms, {1e3 * one['all_layers_s'][0]:.1f} ms"


@if_measured
def overlapped(result: Result) -> str:
    """Return the table of `lab/experiments/layerwise.py`: a row per bandwidth, a column per recomputed share and round trip."""
    columns = [
        (context, trip)
        for context in result["contexts"]
        for trip in dict.fromkeys(point["round_trip_s"] for point in context["points"])
    ]
    multiples = dict.fromkeys(
        point["of_balance"] for context in result["contexts"] for point in context["points"]
    )
    gains = [
        {point["of_balance"]: point["gain"] for point in context["points"] if point["round_trip_s"] == trip}
        for context, trip in columns
    ]
    balances = ", ".join(
        f"{context['balance'] / 1e6:,.0f} MB/s with {context['ratio']:.0%} recomputed"
        for context in result["contexts"]
    )
    return "\n".join(
        [
            "The cells have the time to the first token that loading layer by layer saves, compared with loading entry by entry: medians (smallest – "
            "largest). Rows are bandwidths of the link, as multiples of the bandwidth at which loading takes as long as computing, which is "
            f"{balances}.",
            "",
            *table(
                [
                    "bandwidth",
                    *(
                        f"{context['ratio']:.0%} recomputed, {1e3 * trip:g} ms round trip"
                        for context, trip in columns
                    ),
                ],
                ([f"{multiple:g} ×", *(percent(gain[multiple]) for gain in gains)] for multiple in multiples),
            ),
            "",
            f"`{result['command']}`, {result['date']}, {result['commit']}, {result['machine']}, {result['threads']} threads.",
        ]
    )


def counted_reuse(result: Result | None) -> str:
    """Return a table with a row for each traffic and a column for each cache."""
    if result is None:
        return "Not counted yet."
    points = result["points"]
    base = points[0]["traffic"]
    names = [cache["cache"] for cache in points[0]["caches"]]
    lines = [
        f"{base['queries']:,} questions for {', '.join(traffic_parts(base))}, and one of these changed at a time. Each cell has the number of stored "
        "chunks; the share of retrieved chunks that was found; the share of the repeated work of `prefix` that was avoided; and the share computed "
        f"while answering. `{result['command']}`, {result['date']}, {result['commit']}.",
        "",
        *table(
            ["", *(f"`{name}`" for name in names)],
            ([traffic_label(point, base), *map(cache_cell, point["caches"])] for point in points),
        ),
    ]
    return "\n".join(lines)


def traffic_parts(traffic: Result) -> list[str]:
    return [
        f"{traffic['chunks_per_query']} chunks each",
        f"exponent {traffic['exponent']:g}",
        f"{traffic['shuffled']:.0%} shuffled",
        f"{traffic['repeated']:.0%} repeated",
    ]


def traffic_label(point: Result, base: Result) -> str:
    if point["cap"] is not None:
        return f"at most {point['cap']:,} chunks"
    return (
        ", ".join(text for text in traffic_parts(point["traffic"]) if text not in traffic_parts(base))
        or "as stated"
    )


def cache_cell(cache: Result) -> str:
    avoided = "–" if cache["avoided"] is None else f"{cache['avoided']:.0%}"
    return f"{cache['stored']:,}; {cache['hit_rate']:.0%}; {avoided}; {cache['answering_share']:.0%}"


def ms(spread: Sequence[float]) -> str:
    return "{:.1f} ms ({:.1f} – {:.1f})".format(*(1e3 * value for value in spread))


def times(spread: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} – {:.2f})".format(*spread)


def percent(spread: Sequence[float]) -> str:
    return "{:.1%} ({:.1%} – {:.1%})".format(*spread)
