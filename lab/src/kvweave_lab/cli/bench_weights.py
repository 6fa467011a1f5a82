"""bench: the command that measures fewer bits of the weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.models.adapter import Adapter
    from kvweave_lab.bench.weights import Speed, WeightsBench, WeightsSettings

VARIANTS = {
    "float32": ("float32", "full"),
    "bfloat16": ("bfloat16", "full"),
    "float16": ("float16", "full"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}
"""Names of variants: dtype and bits."""
DEFAULT_VARIANTS = ("float32", "int8", "int4")


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """The model whose variants are measured."""

    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", help=f"A real model's shape, with random weights. Default: {bench.DEFAULT_SHAPE}."
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="A hub id or folder, or `reference`, instead of a shape.")
    ] = None
    device: Annotated[str | None, opt.declared("device")] = None


@dataclass(frozen=True, slots=True)
class WeightsOptions:
    """The options of `bench weights`: the variants, the prompts, and the file for results."""

    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            help="float32, bfloat16, float16, int8 or int4; repeatable. The others are compared with the first. "
            "Default: float32, int8, int4.",
        ),
    ] = None
    gguf: Annotated[
        list[Path] | None,
        typer.Option("--gguf", help="A GGUF file of the same model, run by llama.cpp; repeatable."),
    ] = None
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", help="A text file to measure quality on; repeatable. Default: quality is not measured."
        ),
    ] = None
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=8, help="Tokens of the prompt.")] = 512
    ratio: Annotated[
        float, typer.Option("--ratio", min=0, max=1, help="Share of the prompt's rows to recompute.")
    ] = 0.15
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens decoded.")] = 32
    text_tokens: Annotated[
        int, typer.Option("--text-tokens", min=2, help="Largest number of text tokens to use.")
    ] = 2048
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of times that all variants are timed, in turn.")
    ] = 5
    output: Annotated[
        Path | None, typer.Option("--output", help="A JSON file that the measurement is appended to.")
    ] = None

    def settings(self) -> "WeightsSettings":
        """Return the settings of the measurement."""
        from kvweave_lab.bench.weights import WeightsSettings

        return WeightsSettings(self.prompt_tokens, self.ratio, self.new_tokens, self.rounds, self.text_tokens)

    def texts(self) -> str:
        """Return the contents of the text files; raises InvalidRequest if one cannot be read."""
        from kvweave.errors import InvalidRequest

        try:
            return "\n\n".join(path.read_text(encoding="utf-8") for path in self.text or ())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--text cannot be read: {error}") from error


@keeps_nothing
@opt.with_options()
def weights(
    *, model: BenchedModel, options: WeightsOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Speed, memory and quality of weights in 8 and 4 bits, compared with full precision and with llama.cpp."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.results import facts
    from kvweave_lab.bench.weights import bench_weights

    opt.quiet_libraries()
    names = bench.chosen(options.variant or DEFAULT_VARIANTS, list(VARIANTS), "variant")
    text = options.texts()
    name = model.model or model.shape or bench.DEFAULT_SHAPE

    def load(variant: str) -> "Adapter":
        dtype, bits = VARIANTS[variant]
        if dtype == "auto" and (model.device or "cpu") != "cpu":
            dtype = "bfloat16"  # what fewer bits are multiplied in there
        chosen = bench.DeviceModel(model.shape, model.model, dtype, bits)
        return chosen.load(model.device or "cpu")[0]

    with progress_bar(quiet or json) as report:
        done = bench_weights(name, load, names, options.gguf or (), text, options.settings(), report)
    content = {**facts(done), **bench.environment()}
    if options.output:
        bench.append_measurement(options.output, content)
    if json:
        print_json(content)
        return
    STDOUT.print(_table(done))


def _table(done: "WeightsBench") -> "Table":
    from kvweave.cli.output import amount, seconds, share
    from kvweave_lab.report import text_table

    asked = done.settings
    table = text_table(
        "weights|held|memory|prefill|×|recompute|×|per token|×|KL|agree".split("|"),
        title=f"{done.model}: prompt of {asked.prompt_tokens:,} tokens, {share(asked.ratio)} recomputed, {done.threads} threads",
        caption=f"medians of {asked.rounds} rounds; ×: speed over {done.variants[0].name}; KL in nats per token",
    )

    def cells(speed: "Speed | None") -> tuple[str, str]:
        if speed is None:
            return "", ""
        return seconds(speed.seconds.median), f"{speed.of_first.median:.2f}"

    for one in done.variants:
        quality = one.quality
        table.add_row(
            one.name,
            amount(one.weight_bytes),
            "" if one.resident_bytes is None else amount(one.resident_bytes),
            *cells(one.prefill),
            *cells(one.recompute),
            *cells(one.decode),
            "" if quality is None else f"{quality.kl:.4f}",
            "" if quality is None else f"{quality.agreement:.1%}",
        )
    return table
