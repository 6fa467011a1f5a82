"""What every benchmark has in common: its arguments, and what has to stand beside each measured number."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvweave.errors import KvweaveError
from kvweave.models.adapter import Adapter
from kvweave_lab.bench import circumstances as told
from kvweave_lab.bench.spread import Spread


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--output` already, the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    return parser


def command_of(given: argparse.Namespace) -> str:
    """The command that measures the same again: every option with its value, but not the file it writes."""
    words = [f"lab/experiments/{Path(sys.argv[0]).name}"]
    for name, value in vars(given).items():
        if name == "output" or value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [option, f"{one:g}" if isinstance(one, float) else str(one)]
    return " ".join(words)


def circumstances(command: str) -> dict[str, object]:
    """The command, the commit, the day, the machine, as results of `kvweave bench` have them."""
    return asdict(told.circumstances(command))


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


def started(main: Callable[[], None]) -> None:
    """Run a script; what cannot be done is said in one line, as `kvweave` does."""
    try:
        main()
    except (KvweaveError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
