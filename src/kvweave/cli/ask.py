"""ask: answer one question, with sources."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.results import Answer, ExplainedToken


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "system",
    *opt.REUSE,
    *("ratio", "coverage", "top_k"),
    *("max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
)
def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    *,
    options: opt.SharedOptions,
    drop_chunks: Annotated[
        bool,
        typer.Option(
            "--drop-chunks",
            envvar="KVWEAVE_DROP_CHUNKS",
            help="Leave out the lowest-ranked chunks if the prompt is too long.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Compute the answer again, even if it is cached, and cache the new one."
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show the prompt coloured by what was reused, the plan, and where the time went.",
        ),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Answer a question from the documents, with sources."""
    opt.quiet_libraries()
    ratio, coverage = options.budget(context)
    with options.open_kb() as base:
        stream = base.stream(
            question,
            ratio=ratio,
            coverage=coverage,
            top_k=options.top_k,
            drop_chunks=drop_chunks,
            cache="refresh" if fresh else "use",
        )
        for piece in stream:
            if not json:
                typer.echo(piece, nl=False)
        answer = stream.answer
        tokens = stream.explain() if explain else None
    _print_answer(answer, tokens, json=json)


def _print_answer(answer: "Answer", tokens: "Sequence[ExplainedToken] | None", *, json: bool) -> None:
    """Print what comes after the text, or everything as JSON; `tokens` are the explained ones, if asked for."""
    from kvweave.cli.output import print_json
    from kvweave.engine.facts import facts

    if json:
        print_json(answer if tokens is None else {**facts(answer), "tokens": tokens})
        return
    typer.echo()
    _print_sources(answer)
    if tokens is not None:
        from kvweave.cli.explain import print_explanation

        print_explanation(answer, tokens)


def _print_sources(answer: "Answer") -> None:
    from rich.markup import escape
    from rich.text import Text

    from kvweave.cli.explain import describe_cache_hit
    from kvweave.cli.output import STDOUT, amount, seconds, share

    STDOUT.print()
    for source in answer.sources:
        place = f"  {source.document} [{source.start}:{source.end}]  "
        beginning = " ".join(source.text.split())[:80]
        STDOUT.print(Text.assemble((place, "dim"), beginning), soft_wrap=True)
    plan, timing = answer.plan, answer.timing
    if plan.cache_hit is not None:
        STDOUT.print(
            f"  [dim]{escape(describe_cache_hit(plan.cache_hit))}, after {seconds(timing.total_s)}[/]",
            soft_wrap=True,
        )
        return
    STDOUT.print(
        f"  [dim]{share(plan.reused_share)} of {plan.prompt_tokens} prompt tokens reused; first token after "
        f"{seconds(timing.ttft_s)}[/]"
    )
    decoding = answer.decoding
    if decoding is not None:
        STDOUT.print(
            f"  [dim]decoded with at most {amount(decoding.resident_bytes)} of KV in memory; each token read "
            f"{amount(decoding.bytes_per_token)} from {decoding.reads_per_token:.1f} places[/]"
        )
