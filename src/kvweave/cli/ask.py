"""ask: answer one question, with sources."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.results import Answer


def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    system: opt.System = None,
    recipe: opt.Recipe = None,
    prepare: opt.Prepare = None,
    storage: opt.Storage = None,
    auxiliary: opt.Auxiliary = None,
    shared: opt.Shared = None,
    ratio: Annotated[
        float | None,
        typer.Option(envvar="KVWEAVE_RATIO", help="Share of the reused context to recompute, 0 to 1."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            envvar="KVWEAVE_COVERAGE",
            help="Instead: recompute as few tokens as hold this share of all scores, 0 to 1; from 2 % to half of them.",
        ),
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
    kv_budget: opt.KvBudget = None,
    resident_bytes: opt.ResidentBytes = None,
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
    from kvweave.cli.output import print_json
    from kvweave.engine.facts import facts

    opt.quiet_libraries()
    ratio, coverage = opt.one_budget(context, ratio, coverage)
    with opt.open_kb(
        kb,
        home,
        model=model,
        dtype=dtype,
        device=device,
        system=system,
        recipe=recipe,
        prepare=prepare,
        storage=storage,
        auxiliary=auxiliary,
        shared=shared,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        kv_budget=kv_budget,
        resident_bytes=None if resident_bytes is None else opt.size_bytes(resident_bytes),
    ) as base:
        stream = base.stream(
            question,
            ratio=ratio,
            coverage=coverage,
            top_k=top_k,
            drop_chunks=drop_chunks,
            cache="refresh" if fresh else "use",
        )
        for piece in stream:
            if not json:
                typer.echo(piece, nl=False)
        answer = stream.answer
        tokens = stream.explain() if explain else ()
    if json:
        print_json({**facts(answer), "tokens": tokens} if explain else answer)
        return
    typer.echo()
    _print_sources(answer)
    if explain:
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
