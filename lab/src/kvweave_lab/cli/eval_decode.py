"""eval decode: what long decoding with the KV on flash is worth, strategy by strategy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_output
from kvweave_lab.cli import bench_options as bench

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave_lab.eval.longtext.telling import LongText

LENGTHS = (512, 1024, 1792)
BUDGETS = (0.15,)


@keeps_output
def decode(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            envvar="KVWEAVE_MODEL",
            help="Hub id or local folder. Default: longer, the shipped model that was trained on texts of 8K tokens.",
        ),
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="reasoning, dialogue or story; repeatable. Default: all."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", help="A strategy, or dynakv/ABLATION; repeatable. Default: every strategy."
        ),
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations", help="Every strategy and every ablation of dynakv, beside what --strategy names."
        ),
    ] = False,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", min=16, help="Tokens decoded, a row each; repeatable. Default: 512, 1024, 1792."
        ),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option("--budget", help="As --kv-budget; repeatable. Default: 15 %."),
    ] = None,
    storage: Annotated[
        list[str] | None, typer.Option("--storage", help="exact, int8 or int4; repeatable. Default: exact.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed of the texts; repeatable. Default: 0, 1, 2.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Texts per kind and seed; of a file, the first so many.")
    ] = 4,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=32, help="Tokens before decoding begins.")
    ] = 256,
    cluster_entries: Annotated[
        int | None,
        typer.Option(
            "--cluster-entries",
            min=1,
            help="Mean size of clusters; short texts and small budgets need small ones. Default: 32.",
        ),
    ] = None,
    resident_bytes: Annotated[
        str | None,
        typer.Option("--resident-bytes", help="Bound of KV in memory. Default: 30 % of the longest text's."),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Pool of names, phrases and texts: dev, test or hidden.")
    ] = "dev",
    haystack: Annotated[
        Path | None, typer.Option("--haystack", help="Folder of .txt and .md files as natural text.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", help="KIND=PATH instead of generated texts: mmlu, arc, writingprompts, sharegpt."
        ),
    ] = None,
    folder: bench.Folder = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="Folder for JSON, plots and report; run again, it goes on where it stopped."
        ),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Long texts under every decoding strategy: recall, output error, answers, and what was read for them."""
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.models.loading import load_model
    from kvweave_lab.eval.decoding.files import write
    from kvweave_lab.eval.decoding.measure import Request, evaluate_decoding
    from kvweave_lab.eval.decoding.tables import beside_table, content, quality_table, return_table
    from kvweave_lab.eval.longtext import LONG_TASKS

    opt.quiet_libraries()
    adapter = load_model(model or "longer", dtype=dtype or "auto", device=device or "auto")
    lengths = tuple(length or LENGTHS)
    request = Request(
        tasks=() if file else tuple(task or LONG_TASKS),
        lengths=lengths,
        variants=_variants(strategy or (), ablations=ablations),
        budgets=tuple(budget or BUDGETS),
        storages=tuple(opt.storages_named(storage or ["exact"])),
        seeds=tuple(seed or (0, 1, 2)),
        samples=samples,
        prompt_tokens=prompt_tokens,
        cluster_entries=cluster_entries,
        resident_bytes=None if resident_bytes is None else opt.size_bytes(resident_bytes),
        split=split,
        haystack=haystack,
        texts=_from_files(adapter, file or (), samples, lengths[-1]),
        folder=folder,
        output=output,
    )
    with progress_bar(quiet or json) as report:
        done = evaluate_decoding(adapter, request, report)
    about = _about()
    files = write(output, done, about) if output else []
    if json:
        print_json(content(done, about))
        return
    STDOUT.print(quality_table(done))
    STDOUT.print(beside_table(done))
    STDOUT.print(return_table(done))
    for path in files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


def _variants(named: Sequence[str], *, ablations: bool) -> tuple[str, ...]:
    from kvweave.decode.strategies import STRATEGIES
    from kvweave_lab.eval.decoding.ablations import all_variants

    return tuple(dict.fromkeys([*(all_variants() if ablations else ()), *named])) or tuple(STRATEGIES)


def _about() -> dict[str, object]:
    """What has to stand beside figures."""
    import datetime

    from kvweave import __version__

    return {
        "command": bench.this_command(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _from_files(
    adapter: "Adapter", given: "list[str] | tuple[str, ...]", samples: int, decode_tokens: int
) -> "tuple[LongText, ...]":
    from kvweave.errors import InvalidRequest
    from kvweave_lab.eval.longtext.readers import LONG_READERS, read_long

    texts: list[LongText] = []
    for one in given:
        kind, _, path = one.partition("=")
        if kind not in LONG_READERS or not path:
            raise InvalidRequest(
                f"--file {one}: give KIND=PATH with one of {', '.join(LONG_READERS)} as kind"
            )
        texts += read_long(kind, Path(path), adapter.template, samples, decode_tokens)
    return tuple(texts)
