"""bench: the command that counts what prefix caches and chunk KV reuse."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave_lab.bench.reuse import ReuseCounts, ReusePoint
    from kvweave_lab.bench.workload import Traffic


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """The options of `bench reuse`: the drawn questions, and the ratio."""

    queries: Annotated[int, typer.Option("--queries", min=1, help="Number of questions.")] = 1000
    known_share: Annotated[
        float,
        typer.Option("--known-share", help="Share of retrieved chunks that come from preloaded documents."),
    ] = 0.6
    shared_share: Annotated[
        float,
        typer.Option(
            "--shared-share", help="Share of retrieved chunks from documents that are added later and shared."
        ),
    ] = 0.3
    known_chunks: Annotated[int, typer.Option("--known-chunks", help="Chunks of preloaded documents.")] = 1000
    shared_chunks: Annotated[
        int, typer.Option("--shared-chunks", help="Chunks of documents that are added later and shared.")
    ] = 500
    chunks_per_query: Annotated[
        list[int] | None,
        typer.Option("--chunks-per-query", help="Chunks retrieved per question. Default: 5, and 10 and 20."),
    ] = None
    exponent: Annotated[
        list[float] | None,
        typer.Option("--exponent", help="Exponent of chunk popularity. Default: 1, and 0.6 and 1.4."),
    ] = None
    shuffled: Annotated[
        list[float] | None,
        typer.Option(
            "--shuffled", help="Share of questions with chunks in random order. Default: 1, and 0.5 and 0."
        ),
    ] = None
    repeated: Annotated[
        list[float] | None,
        typer.Option(
            "--repeated", help="Share of questions that repeat an earlier one. Default: 0, and 0.3."
        ),
    ] = None
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of stale tokens to recompute.")
    ] = 0.15
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the questions.")] = 0

    def traffics(self) -> "list[Traffic]":
        """Return the first value of each repeatable option, then the other values one at a time."""
        from kvweave_lab.bench.reuse import sweep
        from kvweave_lab.bench.workload import Traffic

        numbers, exponents = self.chunks_per_query or [5, 10, 20], self.exponent or [1.0, 0.6, 1.4]
        orders, repeats = self.shuffled or [1.0, 0.5, 0.0], self.repeated or [0.0, 0.3]
        base = Traffic(
            queries=self.queries,
            chunks_per_query=numbers[0],
            known_share=self.known_share,
            shared_share=self.shared_share,
            known_chunks=self.known_chunks,
            shared_chunks=self.shared_chunks,
            exponent=exponents[0],
            shuffled=orders[0],
            repeated=repeats[0],
            seed=self.seed,
        )
        return sweep(base, chunks_per_query=numbers, exponents=exponents, shuffled=orders, repeated=repeats)


@keeps_nothing
@opt.with_options()
def reuse(*, options: ReuseOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Storage, hits and repeated work of prefix caches and of chunk KV, counted over drawn questions.

    Repeatable options vary one at a time; the first value of each is used while the others vary.
    """
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.bench.reuse import bench_reuse

    opt.quiet_libraries()
    traffics, ratio = options.traffics(), options.ratio
    with progress_bar(quiet or json) as report:
        done = bench_reuse(traffics, report)
    if json:
        print_json(
            {"ratio": ratio, "points": [_reuse_json(point, ratio) for point in done], **bench.environment()}
        )
        return
    STDOUT.print(_reuse_table(done, ratio))


def _reuse_json(point: "ReusePoint", ratio: float) -> dict[str, Any]:
    from kvweave.results import facts

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
    from kvweave_lab.report import text_table

    base = points[0].traffic
    table = text_table(
        ("", "stored", "of prefix", "found", "exact", "again", "avoided", "answering"),
        title=f"{base.queries:,} questions for {', '.join(_traffic_texts(base))}\n"
        f"chunks: {base.known_share:.0%} of {base.known_chunks:,} known, {base.shared_share:.0%} of "
        f"{base.shared_chunks:,} new and shared, the rest unique",
        caption="stored: chunks. found, exact, answering: share of retrieved chunks; avoided: share of what prefix"
        f" computes again.\nanswering: computed while answering, with {ratio:.0%} of what is stale",
    )
    table.columns[0].no_wrap = True
    for point in points:
        table.add_row(f"[bold]{_point_label(point, base)}[/bold]")
        for one in point.caches:
            table.add_row(f"  {one.cache}", *_reuse_cells(point, one, ratio))
    return table


def _traffic_texts(traffic: "Traffic") -> list[str]:
    """Return the values that a sweep changes, as texts."""
    return [
        f"{traffic.chunks_per_query} chunks each",
        f"exponent {traffic.exponent:g}",
        f"{traffic.shuffled:.0%} shuffled",
        f"{traffic.repeated:.0%} repeated",
    ]


def _point_label(point: "ReusePoint", base: "Traffic") -> str:
    """Return how a point differs from the base."""
    if point.cap is not None:
        return f"at most {point.cap:,} chunks"
    usual = _traffic_texts(base)
    return ", ".join(text for text in _traffic_texts(point.traffic) if text not in usual) or "as above"


def _reuse_cells(point: "ReusePoint", one: "ReuseCounts", ratio: float) -> list[str]:
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
