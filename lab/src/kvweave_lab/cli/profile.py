"""profile-layers: measure once per model which layers predict what an answer attends to."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.types import ModelFingerprint
    from kvweave_lab.eval.selection.layer_attention import LayerProfile


@keeps_nothing
@opt.with_options("home", *opt.MODEL)
def profile_layers(
    *,
    options: opt.SharedOptions,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", help="Task of the prompts; repeatable. Default: four that need several chunks."
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts per task.")] = 8,
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", min=64, help="Length of the context.")
    ] = 512,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=16, help="Largest chunk.")] = 96,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Find the layers that qcfuse scores tokens with.

    Their attention from the question predicts decoding best. They are stored for this model.
    """
    from dataclasses import asdict, replace

    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.config import default_home
    from kvweave_lab.eval.evaluation import haystack_of, token_count
    from kvweave_lab.eval.grid import generated_cases, suite_named
    from kvweave_lab.eval.selection.layer_attention import profile_layers as measure_layers

    opt.quiet_libraries()
    adapter = options.load_model()
    prompts = replace(
        suite_named("quick"),
        tasks=tuple(task or ("multikey", "twohop", "coref", "vartrack")),
        context_tokens=(context_tokens,),
        chunk_tokens=chunk_tokens,
        samples=samples,
    )
    cases = generated_cases(prompts, "dev", haystack_of("dev", None), token_count(adapter))
    drawn = [case.sample for case in cases]
    with progress_bar(quiet or json) as progress:
        profile = measure_layers(adapter, drawn, progress=progress)
    path = _write((options.home or default_home()).expanduser(), adapter.fingerprint, asdict(profile))
    if json:
        print_json({"file": str(path), **asdict(profile)})
        return
    STDOUT.print(_table(profile))
    STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


def _write(home: Path, model: "ModelFingerprint", found: Mapping[str, object]) -> Path:
    """Store what was found and return the file that models are loaded with. Raises StoreError if that fails."""
    from json import dumps

    from kvweave.errors import StoreError
    from kvweave.files import write_atomically
    from kvweave.models.loading import layers_file

    path = layers_file(home, model)
    text = dumps({"model": model.name, **found}, indent=2) + "\n"
    try:
        write_atomically(path, [text.encode()])
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; name another --home") from error
    return path


def _table(profile: "LayerProfile") -> "Table":
    from rich.table import Table

    from kvweave.cli.output import share

    table = Table("layer", "found of what decoding attends to", "", box=None, header_style="bold")
    for layer, value in enumerate(profile.found):
        table.add_row(str(layer), share(value), "critical" if layer in profile.critical_layers else "")
    return table
