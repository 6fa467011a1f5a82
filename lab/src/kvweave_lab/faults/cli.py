"""kvweave-faults: runs the campaign."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvweave.errors import KvweaveError
from kvweave_lab.faults import shim

_MODULE = "kvweave_lab.faults.cli"
_SHOWN = 5


def faults(
    minutes: Annotated[float, typer.Option(help="How long new histories begin.")] = 10.0,
    short: Annotated[
        bool, typer.Option("--short", help="One small history of each kind, as the tests run it.")
    ] = False,
    every: Annotated[bool, typer.Option("--every", help="Check a crash after every single call.")] = False,
    seed: Annotated[int, typer.Option(help="The first history's seed; each next one counts on.")] = 1,
    kinds: Annotated[
        str, typer.Option(help="Which faults, separated by commas.")
    ] = "crash,error,damage,entries,shared",
    processes: Annotated[int, typer.Option(min=1, help="Histories at once.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the log of histories; the same one resumes.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="JSON file for the counts by fault and finding.")
    ] = None,
) -> None:
    """Crash, damage and fill up small homes, and check what must be true of them; exit code 1 if anything is not.

    Each history prints its seed, how many homes it checked, and what broke.
    """
    from kvweave_lab.faults.campaign import EVERY, KINDS, LONG, SHORT, run, summary

    chosen = kinds.split(",")
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no kind of fault; there are {', '.join(KINDS)}")
    ends, size = time.monotonic() + 60 * minutes, SHORT if short else EVERY if every else LONG

    def until(begun: int) -> bool:
        return begun >= len(chosen) if short else time.monotonic() > ends

    histories = []
    for history in run(chosen, seed, size, processes, until, output):
        histories.append(history)
        homes, broken = sum(history.checked.values()), len(history.broken)
        print(
            f"{history.kind} {history.seed}: {homes} homes, {broken} broken, {history.seconds:.0f} s",
            flush=True,
        )
        for fault, invariant, detail in history.broken[:_SHOWN]:
            print(f"  {fault}: {invariant}: {detail}", flush=True)
    found = summary(histories, shlex.join(["kvweave-faults", *sys.argv[1:]]))
    for fault, number in found["homes_by_fault"].items():
        print(f"{number:7,} {fault}")
    for each in found["broken"]:
        print(f"{each['homes']:7,} broken: {each['fault']}: {each['invariant']}")
    if report is not None:
        report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if found["broken"]:
        raise typer.Exit(1)


def main() -> None:
    """Run `kvweave-faults`; starts itself again with the library that injects faults."""
    if shim.is_loaded():
        typer.run(faults)
        return
    try:
        code = shim.run_with_shim(["-m", _MODULE, *sys.argv[1:]])
    except KvweaveError as error:
        print(error, file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
