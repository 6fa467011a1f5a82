"""cache: the chunk-KV store of a knowledge base, and what answers and predictions have brought."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.engine.knowledge_base import KnowledgeBase
    from kvweave.kvstore.reports import StoreStats


app = typer.Typer(help="Look at, check, limit or empty the chunk-KV store.", no_args_is_help=True)


@app.command("stats")
def stats(
    home: opt.Home = None, kb: opt.Kb = "default", shared: opt.Shared = None, json: opt.Json = False
) -> None:
    """Sizes, counts, heat and hit rates, per kind and per tier; what answers kept and questions predicted have brought."""
    # codemod
    from kvweave.cli.output import STDOUT, print_json, share
    from kvweave.engine.facts import facts

    with opt.open_kb(kb, home, shared=shared) as base:
        found = base.store.stats()
        brought = earned(base)
    if json:
        print_json({**facts(found), **brought})
        return
    STDOUT.print(_kinds(found))
    STDOUT.print()
    STDOUT.print(_tiers(found))
    looked_up = found.hits + found.misses
    rate = share(found.hits / looked_up) if looked_up else "none yet"
    STDOUT.print(
        f"look-ups found: {rate} of {looked_up:,}; evicted {found.evicted:,}, damaged {found.damaged:,}"
    )
    tell_earned(brought)


def _kinds(found: "StoreStats") -> "Table":
    from rich.table import Table

    from kvweave.cli.output import amount

    table = Table("kind", "entries", "tokens", "size", "heat", box=None, header_style="bold")
    for kind, totals in sorted(found.by_kind.items()):
        table.add_row(
            kind, f"{totals.entries:,}", f"{totals.tokens:,}", amount(totals.bytes), f"{totals.heat:,.1f}"
        )
    table.add_row(
        "all",
        f"{found.entries:,}",
        f"{found.tokens:,}",
        f"{amount(found.bytes)} of {amount(found.limit_bytes)}",
        f"{sum(totals.heat for totals in found.by_kind.values()):,.1f}",
    )
    return table


def _tiers(found: "StoreStats") -> "Table":
    from rich.table import Column, Table
    from rich.text import Text

    from kvweave.cli.output import amount, share

    where = Column("", overflow="fold")  # an address is no use without its end
    table = Table("tier", "entries", "size", "limit", "hits", where, box=None, header_style="bold")
    for tier, totals in found.by_tier.items():
        hits = share(totals.hits / found.hits) if found.hits else "none yet"
        waiting = f"{totals.waiting:,} still to be sent" if totals.waiting else ""
        note = Text("; ".join(part for part in (totals.state, waiting) if part))
        table.add_row(
            tier, f"{totals.entries:,}", amount(totals.bytes), amount(totals.limit_bytes), hits, note
        )
    return table


@app.command("verify")
def verify(
    home: opt.Home = None,
    kb: opt.Kb = "default",
    tier: opt.RemoteTier = None,
    shared: opt.Shared = None,
    json: opt.Json = False,
) -> None:
    """Check every stored entry; drop what is damaged, sweep what nothing lists. Exit code 1 if damage was found."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave.engine.facts import facts

    with opt.open_kb(kb, home, shared=shared) as base:
        report = base.store.verify(None if tier is None else opt.tier_named(tier))
    if json:
        print_json(report)
    else:
        said = (f"{name.replace('_', ' ')}: {value}" for name, value in facts(report).items())
        STDOUT.print(", ".join(said), markup=False, soft_wrap=True)
    if not report.sound:
        raise typer.Exit(1)


@app.command("limit")
def limit(
    size: Annotated[str, typer.Argument(help="A size such as 500MB or 20GB.", show_default=False)],
    home: opt.Home = None,
    kb: opt.Kb = "default",
    tier: opt.RemoteTier = None,
    shared: opt.Shared = None,
) -> None:
    """Set a tier's hard cap, the disk's by default; what is least worth keeping goes at once if there is too much."""
    from kvweave.cli.output import STDOUT, amount

    limit_bytes = opt.size_bytes(size)
    named = opt.tier_named(tier or "disk")
    with opt.open_kb(kb, home, shared=shared) as base:
        base.store.set_limit(limit_bytes, named)
        found = base.store.stats().by_tier[named]
    STDOUT.print(f"limit {amount(found.limit_bytes)}; {amount(found.bytes)} in use")


@app.command("clear")
def clear(
    home: opt.Home = None, kb: opt.Kb = "default", tier: opt.RemoteTier = None, shared: opt.Shared = None
) -> None:
    """Drop all stored KV of a tier, the disk by default; documents stay, and the next add computes or fetches it again."""
    from kvweave.cli.output import STDOUT

    named = opt.tier_named(tier or "disk")
    with opt.open_kb(kb, home, shared=shared) as base:
        dropped = base.store.clear(named)
    STDOUT.print(f"dropped {dropped} entries")


def earned(base: "KnowledgeBase") -> dict[str, Any]:
    """The answer bank, predictions, and the idle time they took, as plain values."""
    from kvweave.engine.facts import facts

    predictions = base.predictions.ledger.totals()
    return {
        "answers": facts(base.answers.totals()),
        "predictions": {**facts(predictions), "given_per_question": predictions.given_per_question},
        "idle": facts(base.idle_record.totals()),
    }


def tell_earned(found: dict[str, Any]) -> None:
    """The same for people; nothing of prediction where there was none."""
    from kvweave.cli.output import STDOUT, amount, seconds, share

    answers, predictions, idle = found["answers"], found["predictions"], found["idle"]
    STDOUT.print(
        f"answers: {answers['answered']:,} of {answers['questions']:,} questions, {answers['waiting']:,} waiting, given "
        f"{answers['given']:,} times; {amount(answers['bytes'])} of {amount(answers['limit_bytes'])}"
    )
    kept = sum(predictions["predicted"].values())
    if kept or predictions["dropped"]:
        by_origin = ", ".join(
            f"{count:,} from {origin}" for origin, count in predictions["predicted"].items()
        )
        served = share(predictions["served"] / kept) if kept else "none"
        STDOUT.print(
            f"predicted: {kept:,} questions ({by_origin}), {predictions['dropped']:,} dropped as unanswerable; "
            f"{predictions['given']:,} answers given from them, {predictions['given_per_question']:.2f} a question, by "
            f"{served} of them"
        )
    if idle:
        spent_s = sum(kind["seconds"] for kind in idle.values())
        flops = sum(kind["flops"] for kind in idle.values())
        STDOUT.print(f"idle time: {seconds(spent_s)}, {flops / 1e12:.3g} TFLOPs")
