"""cache: the chunk-KV store of a knowledge base."""

import re
from typing import Annotated

import typer

from kvweave.cli import options as opt

app = typer.Typer(help="Look at, check, limit or empty the chunk-KV store.", no_args_is_help=True)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@app.command("stats")
def stats(home: opt.Home = None, kb: opt.Kb = "default", json: opt.Json = False) -> None:
    """Sizes, counts and hit rates."""
    from rich.table import Table

    from kvweave.cli.show import STDOUT, amount, print_json, share

    with opt.open_kb(kb, home) as base:
        found = base.store.stats()
    if json:
        print_json(found)
        return
    table = Table("kind", "entries", "tokens", "size", box=None, header_style="bold")
    for kind, totals in sorted(found.by_kind.items()):
        table.add_row(kind, f"{totals.entries:,}", f"{totals.tokens:,}", amount(totals.bytes))
    table.add_row(
        "all",
        f"{found.entries:,}",
        f"{found.tokens:,}",
        f"{amount(found.bytes)} of {amount(found.limit_bytes)}",
    )
    STDOUT.print(table)
    looked_up = found.hits + found.misses
    rate = share(found.hits / looked_up) if looked_up else "none yet"
    STDOUT.print(
        f"look-ups found: {rate} of {looked_up:,}; evicted {found.evicted:,}, damaged {found.damaged:,}"
    )


@app.command("verify")
def verify(home: opt.Home = None, kb: opt.Kb = "default", json: opt.Json = False) -> None:
    """Check every stored file; drop what is damaged, sweep what nothing lists. Exit code 1 if damage was found."""
    from kvweave.cli.show import STDOUT, print_json
    from kvweave.engine.facts import facts

    with opt.open_kb(kb, home) as base:
        report = base.store.verify()
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
) -> None:
    """Set the hard cap on disk; the least used entries go at once if there is too much."""
    from kvweave.cli.show import STDOUT, amount
    from kvweave.errors import InvalidRequest

    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise InvalidRequest(f"{size!r} is not a size; write for example 500MB or 20GB")
    limit_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    with opt.open_kb(kb, home) as base:
        base.store.set_limit(limit_bytes)
        found = base.store.stats()
    STDOUT.print(f"limit {amount(found.limit_bytes)}; {amount(found.bytes)} in use")


@app.command("clear")
def clear(home: opt.Home = None, kb: opt.Kb = "default") -> None:
    """Drop all stored KV; documents stay, and the next add computes it again."""
    from kvweave.cli.show import STDOUT

    with opt.open_kb(kb, home) as base:
        entries = base.store.stats().entries
        base.store.clear()
    STDOUT.print(f"dropped {entries} entries")
