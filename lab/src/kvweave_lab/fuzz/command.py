"""kvweave-fuzz: run hostile files through the readers, and keep how they ended."""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvweave.files import write_atomically
from kvweave_lab.fuzz.campaign import Count, Finding, drawn, run, write
from kvweave_lab.fuzz.readers import READERS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exit with 1 if there are findings."""
    args = _parsed(arguments)
    if args.only is not None:
        (name,) = args.reader
        write(drawn(READERS[name], name, args.seed, args.only), args.folder)
        READERS[name].read(args.folder)
        return
    found = {}
    for name in args.reader or READERS:
        found[name] = _run(name, args)
        print(_line(name, found[name]), flush=True)
    sys.exit(int(any(each.findings for each in found.values())))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvweave-fuzz", description=__doc__)
    parser.add_argument("reader", nargs="*", help=f"of {', '.join(READERS)}; default: all")
    parser.add_argument("--inputs", type=int, default=50_000, help="inputs of each reader")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same inputs")
    parser.add_argument("--output", type=Path, help="JSON file of counts; the same command continues from it")
    parser.add_argument("--only", type=int, help="read this input of one reader here, and show its error")
    parser.add_argument(
        "--folder", type=Path, default=Path("fuzz-input"), help="where --only writes the input"
    )
    args = parser.parse_args(arguments)
    if unknown := set(args.reader) - set(READERS):
        parser.error(f"no reader {', '.join(sorted(unknown))}; choose of {', '.join(READERS)}")
    if args.only is not None and len(args.reader) != 1:
        parser.error("--only needs the name of one reader")
    return args


def _run(name: str, args: argparse.Namespace) -> Count:
    content = _read(args.output, args.seed)
    count = Count(**content["readers"].get(name, {}))
    count.findings = [Finding(**each) for each in content["readers"].get(name, {}).get("findings", ())]
    for _ in run(READERS[name], name, args.seed, args.inputs, count):
        if args.output is not None:
            content["readers"][name] = asdict(count)
            content |= {
                "date": datetime.now(UTC).date().isoformat(),
                "command": shlex.join(["kvweave-fuzz", *sys.argv[1:]]),
            }
            write_atomically(args.output, [(json.dumps(content, indent=1) + "\n").encode()])
    return count


def _read(path: Path | None, seed: int) -> dict[str, Any]:
    """Return the content of the output file, or an empty one if there is no file or it has another seed."""
    if path is not None and path.exists():
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["seed"] == seed:
            return content
    return {"seed": seed, "readers": {}}


def _line(name: str, count: Count) -> str:
    """Return how the inputs of a reader ended, and its kinds of findings, each with its first input."""
    kinds = defaultdict[tuple[str, str], list[Finding]](list)
    for each in count.findings:
        kinds[each.fault, each.where].append(each)
    lines = [
        f"{name}: {count.inputs:,} inputs, {count.read:,} read, {count.refused:,} refused, {len(count.findings):,} findings; "
        f"slowest {count.slowest_s:.1f} s, {count.cpu_s:,.0f} s of processor time"
    ]
    for (fault, where), found in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        lines.append(f"  {len(found)} x {fault} {where}: {found[0].message} (--only {found[0].number})")
    return "\n".join(lines)
