"""eval lookalikes: which questions may share an answer, by several matchers, on pairs that look alike."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing


@keeps_nothing
def lookalikes(
    split: Annotated[
        str, typer.Option("--split", help="Pool of phrasings: dev (to tune on) or test (to report).")
    ] = "dev",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the pairs.")] = 0,
    paraphrases: Annotated[
        int, typer.Option("--paraphrases", min=1, help="Pairs that ask the same and should share an answer.")
    ] = 1000,
    pairs: Annotated[
        int,
        typer.Option(
            "--lookalikes", min=1, help="Pairs that do not and must not, in equal numbers of each kind."
        ),
    ] = 5000,
    embedding_model: opt.EmbeddingModel = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for JSON and plot.")] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Paraphrases that should share an answer, look-alikes that must not: hit rates of every matcher and threshold."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.embedding import TextEncoder
    from kvweave_lab.bench.circumstances import circumstances
    from kvweave_lab.eval.lookalikes.measure import run_lookalikes
    from kvweave_lab.eval.lookalikes.report import content, curve_table, kind_table, write

    opt.quiet_libraries()
    said = asdict(circumstances(shlex.join(["kvweave", *sys.argv[1:]])))
    with progress_bar(quiet or json) as report:
        done = run_lookalikes(
            TextEncoder(embedding_model),
            split=split,
            paraphrases=paraphrases,
            lookalikes=pairs,
            seed=seed,
            progress=report,
        )
    files = write(output, done, said) if output else []
    if json:
        print_json(content(done, said))
        return
    STDOUT.print(curve_table(done))
    STDOUT.print(kind_table(done))
    for path in files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)
