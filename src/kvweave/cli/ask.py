"""ask: one question, answered with its sources."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.core import Answer


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    system: opt.System = None,
    recipe: opt.Recipe = None,
    ratio: Annotated[
        float | None,
        typer.Option(envvar="KVWEAVE_RATIO", help="Share of the reused context to recompute, 0 to 1."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(envvar="KVWEAVE_TOP_K", help="Chunks in front of the question. Default: 5.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            envvar="KVWEAVE_MAX_NEW_TOKENS",
            help="Longest answer. Default: 256, or an eighth of the model's context.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(envvar="KVWEAVE_TEMPERATURE", help="0 is greedy.")
    ] = None,
    drop_chunks: Annotated[
        bool,
        typer.Option(
            "--drop-chunks",
            envvar="KVWEAVE_DROP_CHUNKS",
            help="Leave out the lowest-ranked chunks if the prompt is too long.",
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was reused and where the time went.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Answer a question from the documents, with sources."""
    from kvweave.cli.show import print_json

    opt.quiet_libraries()
    with opt.open_kb(
        kb,
        home,
        model=model,
        dtype=dtype,
        device=device,
        system=system,
        recipe=recipe,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    ) as base:
        stream = base.stream(question, ratio=ratio, top_k=top_k, drop_chunks=drop_chunks)
        for piece in stream:
            if not json:
                typer.echo(piece, nl=False)
        answer = stream.answer
    if json:
        print_json(answer)
        return
    typer.echo()
    _tell_sources(answer)
    if explain:
        _tell_plan(answer)


def _tell_sources(answer: "Answer") -> None:
    from rich.text import Text

    from kvweave.cli.show import STDOUT, seconds, share

    STDOUT.print()
    for source in answer.sources:
        place = f"  {source.document} [{source.start}:{source.end}]  "
        beginning = " ".join(source.text.split())[:80]
        STDOUT.print(Text.assemble((place, "dim"), beginning), soft_wrap=True)
    plan, timing = answer.plan, answer.timing
    STDOUT.print(
        f"  [dim]{share(plan.reused_share)} of {plan.prompt_tokens} prompt tokens reused; first token after "
        f"{seconds(timing.ttft_s)}[/]"
    )


def _tell_plan(answer: "Answer") -> None:
    from rich.table import Table

    from kvweave.cli.show import STDOUT, seconds

    table = Table("span", "tokens", "from", "recomputed", "why", box=None, header_style="bold")
    for span in answer.plan.spans:
        name = f"chunk {span.chunk + 1}" if span.kind == "chunk" else span.kind
        table.add_row(name, str(span.tokens), span.origin, str(span.recomputed_tokens), span.reason)
    STDOUT.print()
    STDOUT.print(f"recipe {answer.plan.recipe}, ratio {answer.plan.ratio:g}")
    STDOUT.print(table)
    t = answer.timing
    steps = [
        ("retrieve", t.retrieve_s),
        ("tokenize", t.tokenize_s),
        ("match and load", t.match_s),
        ("place", t.place_s),
        ("select", t.select_s),
        ("recompute", t.recompute_s),
        ("first token", t.ttft_s),
        (f"decode {t.answer_tokens} tokens", t.decode_s),
        ("total", t.total_s),
    ]
    times = Table("step", "time", box=None, header_style="bold")
    for name, value in steps:
        times.add_row(name, seconds(value))
    STDOUT.print(times)
