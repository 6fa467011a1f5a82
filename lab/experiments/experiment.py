"""What all experiments share: options, the facts stored with every result, and the answers of plain transformers."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvweave.errors import KvweaveError
from kvweave.models.adapter import Adapter
from kvweave.types import Prompt
from kvweave_lab.bench.environment import current_environment
from kvweave_lab.bench.measurement import MedianRange


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--output`, the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def run_script(main: Callable[[], None]) -> None:
    """Run a script; an error of kvweave or the operating system becomes one line."""
    try:
        main()
    except (KvweaveError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def command_of(args: argparse.Namespace) -> str:
    """Return the command that repeats the measurement: every option with its value, except for the output file."""
    words = [f"lab/experiments/{Path(sys.argv[0]).name}"]
    for name, value in vars(args).items():
        if name == "output" or value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [option, f"{one:g}" if isinstance(one, float) else str(one)]
    return " ".join(words)


def environment(command: str) -> dict[str, object]:
    """Return the command, version, commit, date and machine, as in results of `kvweave bench`."""
    return asdict(current_environment(command))


def dtype_and_device(adapter: Adapter) -> dict[str, str]:
    """Return the number format and device of a model, for its results."""
    return {
        "dtype": str(adapter.geometry.dtype).removeprefix("torch."),
        "device": str(adapter.geometry.device),
    }


def median_and_range(values: MedianRange) -> list[float]:
    """Return median, smallest and largest value, for JSON."""
    return [values.median, values.low, values.high]


def write_result(result: Mapping[str, Any], output: Path | None) -> None:
    """Print a result as JSON, and write it to the output file if there is one."""
    text = json.dumps(result, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


def plain_answer(adapter: Adapter, question: str, chunks: Sequence[str], max_new_tokens: int) -> str:
    """Return the greedy answer of plain transformers, without a recipe or stored KV."""
    ids = torch.tensor([adapter.template.render(Prompt(question, chunks)).token_ids])
    with torch.no_grad():
        output = adapter.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
    return str(adapter.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
