"""bench reuse: what is stored and computed again, by kind of cache."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.queries import Traffic
    from kvweave_lab.bench.reuse import Reuse, ReusePoint


@keeps_nothing
def reuse(
    queries: Annotated[int, typer.Option("--queries", min=1, help="Questions.")] = 1000,
    known_share: Annotated[
        float,
        typer.Option("--known-share", help="Of the chunks retrieved, those of documents there beforehand."),
    ] = 0.6,
    shared_share: Annotated[
        float, typer.Option("--shared-share", help="Those of documents that come later and are shared.")
    ] = 0.3,
    known_chunks: Annotated[
        int, typer.Option("--known-chunks", help="How many there are beforehand.")
    ] = 1000,
    shared_chunks: Annotated[
        int, typer.Option("--shared-chunks", help="How many come later and are shared.")
    ] = 500,
    chunks_per_query: Annotated[
        list[int] | None, typer.Option("--chunks-per-query", help="Default: 5, and 10 and 20.")
    ] = None,
    exponent: Annotated[
        list[float] | None, typer.Option("--exponent", help="Of popularity. Default: 1, and 0.6 and 1.4.")
    ] = None,
    shuffled: Annotated[
        list[float] | None,
        typer.Option(
            "--shuffled", help="Share of questions with an order of their own. Default: 1, and 0.5 and 0."
        ),
    ] = None,
    repeated: Annotated[
        list[float] | None,
        typer.Option("--repeated", help="Share of questions that came before. Default: 0, and 0.3."),
    ] = None,
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of stale tokens that is computed anew.")
    ] = 0.15,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Storage, hits and repeated work of prefix caches and of chunk KV, counted over drawn questions.

    Of options that may be given several times the first value holds for all others' variations.
    """
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.engine.facts import facts
    from kvweave_lab.bench.circumstances import circumstances
    from kvweave_lab.bench.queries import Traffic
    from kvweave_lab.bench.reuse import bench_reuse, sweep

    opt.quiet_libraries()
    numbers, exponents = chunks_per_query or [5, 10, 20], exponent or [1.0, 0.6, 1.4]
    orders, repeats = shuffled or [1.0, 0.5, 0.0], repeated or [0.0, 0.3]
    base = Traffic(
        queries=queries,
        chunks_per_query=numbers[0],
        known_share=known_share,
        shared_share=shared_share,
        known_chunks=known_chunks,
        shared_chunks=shared_chunks,
        exponent=exponents[0],
        shuffled=orders[0],
        repeated=repeats[0],
        seed=seed,
    )
    points = sweep(base, chunks_per_query=numbers, exponents=exponents, shuffled=orders, repeated=repeats)
    with progress_bar(quiet or json) as report:
        done = bench_reuse(points, report)
    if json:
        told = circumstances(shlex.join(["kvweave", *sys.argv[1:]]))
        print_json({"ratio": ratio, "points": [_facts(point, ratio) for point in done], **facts(told)})
        return
    STDOUT.print(_reuse_table(done, ratio))


def _facts(point: "ReusePoint", ratio: float) -> dict[str, Any]:
    from kvweave.engine.facts import facts

    caches = [
        {
            **facts(one),
            "hit_rate": one.hit_rate,
            "exact_share": one.exact_share,
            "storage_of_prefix": point.storage(one),
            "avoided": point.avoided(one),
            "answering_share": one.answering_share(ratio),
        }
        for one in point.caches
    ]
    return {"traffic": facts(point.traffic), "cap": point.cap, "caches": caches}


def _reuse_table(points: "list[ReusePoint]", ratio: float) -> "Table":
    from rich.table import Table

    base = points[0].traffic
    table = Table(
        box=None,
        header_style="bold",
        title=f"{base.queries:,} questions for {', '.join(_said(base))}\n"
        f"chunks: {base.known_share:.0%} of {base.known_chunks:,} known, {base.shared_share:.0%} of "
        f"{base.shared_chunks:,} new and shared, the rest unique",
        title_justify="left",
        caption="stored: chunks. found, exact, answering: of the chunks retrieved; avoided: of what prefix computes again.\n"
        f"answering: computed then, with {ratio:.0%} of what is stale",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("stored", "of prefix", "found", "exact", "again", "avoided", "answering"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        table.add_row(f"[bold]{_label(point, base)}[/bold]")
        for one in point.caches:
            table.add_row(f"  {one.cache}", *_numbers(point, one, ratio))
    return table


def _said(traffic: "Traffic") -> list[str]:
    """What a sweep changes."""
    return [
        f"{traffic.chunks_per_query} chunks each",
        f"exponent {traffic.exponent:g}",
        f"{traffic.shuffled:.0%} shuffled",
        f"{traffic.repeated:.0%} repeated",
    ]


def _label(point: "ReusePoint", base: "Traffic") -> str:
    """What is special about a point."""
    if point.cap is not None:
        return f"at most {point.cap:,} chunks"
    usual = _said(base)
    return ", ".join(text for text in _said(point.traffic) if text not in usual) or "as above"


def _numbers(point: "ReusePoint", one: "Reuse", ratio: float) -> list[str]:
    avoided = point.avoided(one)
    return [
        f"{one.stored:,}",
        f"{point.storage(one):.0%}",
        f"{one.hit_rate:.1%}",
        f"{one.exact_share:.1%}",
        f"{one.again:,}",
        "–" if avoided is None else f"{avoided:.1%}",
        f"{one.answering_share(ratio):.1%}",
    ]
