"""What every benchmark has in common: its arguments, and what has to stand beside each measured number."""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvweave.bench.spread import Spread
from kvweave.models.adapter import Adapter


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--output` already, the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    return parser


def command_of(given: argparse.Namespace) -> str:
    """The command that measures the same again: every option with its value, but not the file it writes."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}"]
    for name, value in vars(given).items():
        if name == "output" or value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [option, f"{one:g}" if isinstance(one, float) else str(one)]
    return " ".join(words)


def circumstances(command: str) -> dict[str, object]:
    """The command, the commit, the day, the machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": command,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def keep(result: Mapping[str, Any], output: Path | None) -> None:
    """Print a result as JSON, and write it where it is asked for."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


def computed_with(adapter: Adapter) -> dict[str, str]:
    return {
        "dtype": str(adapter.geometry.dtype).removeprefix("torch."),
        "device": str(adapter.geometry.device),
    }


def numbers(spread: Spread) -> list[float]:
    """Median, smallest, largest."""
    return [spread.median, spread.low, spread.high]
