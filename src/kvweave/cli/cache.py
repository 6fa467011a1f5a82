"""cache: the chunk-KV store of a knowledge base, and the savings from cached answers and predictions."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.preparation import sentence
from kvweave.models.gguf.conversions import Conversions

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.kvstore.reports import StoreStats, VerifyReport
    from kvweave.models.gguf.conversions import ConvertedModel


app = typer.Typer(help="Show, verify, limit or clear the chunk-KV store.", no_args_is_help=True)


@app.command("stats", short_help="Show sizes, hit rates and savings.")
@opt.with_options(*opt.KB, "shared")
def stats(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """Show sizes, counts and hit rates by kind and tier, savings from cached answers and predictions, converted GGUF models."""
    from kvweave.cli.output import STDOUT, print_json, say, share
    from kvweave.results import facts

    with options.open_kb() as base:
        found = base.store.stats()
        saved, status = savings(base), base.preparation.status()
        converted = Conversions(base.config.home).all()
    if json:
        print_json({**facts(found), **saved, "preparation": status, "converted_models": converted})
        return
    STDOUT.print(_kinds(found))
    STDOUT.print()
    STDOUT.print(_tiers(found))
    looked_up = found.hits + found.misses
    rate = share(found.hits / looked_up) if looked_up else "none yet"
    STDOUT.print(
        f"found {rate} of {looked_up:,} look-ups; evicted {found.evicted:,}, damaged {found.damaged:,}"
    )
    print_savings(saved)
    if status.left:
        say(sentence(status))
    _print_converted(converted)


def _print_converted(models: "list[ConvertedModel]") -> None:
    """Print the converted GGUF models of the home folder, if it has any."""
    from kvweave.cli.output import STDOUT, amount, say

    if not models:
        return
    total = amount(sum(model.bytes for model in models))
    STDOUT.print(f"converted GGUF models, for all knowledge bases of this home: {len(models)}, {total}")
    for model in models:
        made_from = ", ".join(model.names) or model.folder.name
        say(f"  {amount(model.bytes)}  {made_from}")


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

    where = Column("", overflow="fold")  # wrap addresses instead of cutting them off
    table = Table("tier", "entries", "size", "limit", "hits", where, box=None, header_style="bold")
    for tier, totals in found.by_tier.items():
        hits = share(totals.hits / found.hits) if found.hits else "none yet"
        waiting = f"{totals.waiting:,} still to be sent" if totals.waiting else ""
        note = Text("; ".join(part for part in (totals.state, waiting) if part))
        table.add_row(
            tier, f"{totals.entries:,}", amount(totals.bytes), amount(totals.limit_bytes), hits, note
        )
    return table


@app.command("verify", short_help="Verify every entry, and drop damaged ones.")
@opt.with_options(*opt.KB, "tier", "shared")
def verify(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """Verify every stored entry, drop damaged ones, delete unlisted files. Exit code 1 if anything was damaged."""
    from kvweave.cli.output import print_json, say

    with options.open_kb() as base:
        report = base.store.verify(None if options.tier is None else opt.tier_named(options.tier))
    if json:
        print_json(report)
    else:
        for line in _verified(report):
            say(line)
    if not report.sound:
        raise typer.Exit(1)


def _verified(report: "VerifyReport") -> list[str]:
    """Return the lines of a verification report: one for each kind of fault that occurred."""
    checked, damaged = report.checked + report.shared_checked, (*report.damaged, *report.shared_damaged)
    counted = f"{len(damaged):,} damaged and dropped:" if damaged else "none damaged."
    lines = [f"{checked:,} {'entry' if checked == 1 else 'entries'} verified, {counted}"]
    lines += [f"  {each}" for each in damaged]
    lines += [f"left alone, of a newer format version: {each}" for each in report.newer]
    lines += [f"left alone, could not be opened: {each}" for each in report.unopened]
    if report.swept_files:
        lines.append(f"files deleted that no entry lists: {report.swept_files:,}")
    if report.miscounted:
        lines.append("counters were wrong and are corrected")
    if report.shared_reconciled:
        lines.append(f"wrong records of the shared tier, corrected: {report.shared_reconciled:,}")
    return lines


@app.command("reject", short_help="Say no to a cached answer of another question.")
@opt.with_options(*opt.KB)
def reject(
    question: Annotated[str, typer.Argument(help="The question as you asked it.", show_default=False)],
    *,
    options: opt.SharedOptions,
) -> None:
    """Say no to the answer of another question that a question got from the cache. It never gets it again."""
    from kvweave.cli.output import say

    with options.open_kb() as base:
        for stored in base.reject_answer(question):
            say(f"{question!r} no longer gets the answer to {stored!r}")


@app.command("limit")
@opt.with_options(*opt.KB, "tier", "shared")
def limit(
    size: Annotated[str, typer.Argument(help="A size such as 500MB or 20GB.", show_default=False)],
    *,
    options: opt.SharedOptions,
) -> None:
    """Set the hard limit of a tier (default: disk). Entries over the limit are evicted at once."""
    from kvweave.cli.output import STDOUT, amount

    limit_bytes = opt.size_bytes(size)
    named = opt.tier_named(options.tier or "disk")
    with options.open_kb() as base:
        base.store.set_limit(limit_bytes, named)
        found = base.store.stats().by_tier[named]
    STDOUT.print(f"limit {amount(found.limit_bytes)}; {amount(found.bytes)} in use")


@app.command("clear")
@opt.with_options(*opt.KB, "tier", "shared")
def clear(*, options: opt.SharedOptions) -> None:
    """Drop all chunk KV of a tier (default: disk). Documents stay; the next add computes their KV again.

    From the disk it also deletes converted GGUF models, for all knowledge bases, unless their files are gone.
    """
    from kvweave.cli.output import STDOUT, amount, say

    named = opt.tier_named(options.tier or "disk")
    with options.open_kb() as base:
        dropped = base.store.clear(named)
        deleted, left = Conversions(base.config.home).clear() if named == "disk" else ([], [])
    STDOUT.print(f"dropped {dropped} entries")
    if deleted:
        freed = amount(sum(model.bytes for model in deleted))
        say(
            f"deleted {len(deleted)} converted GGUF model{'s' if len(deleted) > 1 else ''}, {freed}; a knowledge base that uses "
            "one converts it again"
        )
    for model in left:
        made_from = ", ".join(model.names) or "an unknown file"
        say(
            f"left {model.folder} ({amount(model.bytes)}): {made_from} has changed or gone, so it could not be converted again; "
            "delete the folder if no knowledge base needs it"
        )


def savings(base: "KnowledgeBase") -> dict[str, Any]:
    """Return the totals of the answer cache, of predictions and of background work, as plain values."""
    from kvweave.results import facts

    predictions = base.predictions.predicted.totals()
    return {
        "answers": facts(base.answers.totals()),
        "predictions": {**facts(predictions), "given_per_question": predictions.given_per_question},
        "idle": facts(base.background_budget.totals()),
    }


def print_savings(found: dict[str, Any]) -> None:
    """Print these totals as text; leave out predictions and background work that never happened."""
    from kvweave.cli.output import STDOUT, amount, seconds, share

    answers, predictions, idle = found["answers"], found["predictions"], found["idle"]
    STDOUT.print(
        f"answers: {answers['answered']:,} of {answers['questions']:,} questions, {answers['waiting']:,} waiting, given "
        f"{answers['given']:,} times, {answers['judged']:,} as the model judged, {answers['rejected']:,} rejected; "
        f"{amount(answers['bytes'])} of {amount(answers['limit_bytes'])}"
    )
    kept = sum(predictions["predicted"].values())
    if kept or predictions["dropped"]:
        by_origin = ", ".join(
            f"{count:,} from {origin}" for origin, count in predictions["predicted"].items()
        )
        served = share(predictions["served"] / kept) if kept else "none"
        STDOUT.print(
            f"predicted: {kept:,} questions ({by_origin}), {predictions['dropped']:,} dropped; "
            f"{predictions['given']:,} answers given from them, {predictions['given_per_question']:.2f} a question, by "
            f"{served} of them"
        )
    if idle:
        spent_s = sum(kind["seconds"] for kind in idle.values())
        flops = sum(kind["flops"] for kind in idle.values())
        STDOUT.print(f"background work: {seconds(spent_s)}, {flops / 1e12:.3g} TFLOPs")
