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
from kvweave_lab.bench.measurement import MedianRange, current_environment
from kvweave_lab.real_models import MODELS
from kvweave_lab.results_log import dtype_name

DIGITS = 6
"""Decimal places of numbers in stored results."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--output`, the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def shape_parser(description: str | None, *, context_tokens: int) -> argparse.ArgumentParser:
    """Return a parser with `--output` and what a random model and its context are like; `context_tokens` is a default."""
    parser = argument_parser(description)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=context_tokens)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option `--model`, which is a real model unless told otherwise."""
    parser.add_argument(
        "--model",
        default="gemma-3-270m",
        help=f"{', '.join(MODELS)} (see `make real`), reference, or any other",
    )


def shown_model(args: argparse.Namespace) -> str:
    """Return the name of the model for people: of a real one its title, of a file or folder the last part."""
    return MODELS[args.model].title if args.model in MODELS else Path(args.model).stem


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
        "dtype": dtype_name(adapter),
        "device": str(adapter.geometry.device),
    }


def median_and_range(values: MedianRange) -> list[float]:
    """Return median, smallest and largest value, for JSON."""
    return [values.median, values.low, values.high]


def rounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with every number to DIGITS decimal places."""
    short: dict[str, Any] = json.loads(
        json.dumps(content), parse_float=lambda number: round(float(number), DIGITS)
    )
    return short


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
