"""ask: one question, answered with its sources."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from kvweave.cli import options as opt
from kvweave.cli.output import STDOUT, seconds
from kvweave.types import Answer, AnswerCacheHit, ExplainedToken, PlanSpan, Timing, TokenOrigin

if TYPE_CHECKING:
    from kvweave.types import Answer


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
            "--fresh", help="Answer anew, even if the question was asked before, and keep that answer."
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
            bank="renew" if fresh else "serve",
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
    _tell_sources(answer)
    if explain:
        # codemod

        tell_explanation(answer, tokens)


def _tell_sources(answer: "Answer") -> None:
    from rich.markup import escape
    from rich.text import Text

    # codemod
    from kvweave.cli.output import STDOUT, amount, seconds, share

    STDOUT.print()
    for source in answer.sources:
        place = f"  {source.document} [{source.start}:{source.end}]  "
        beginning = " ".join(source.text.split())[:80]
        STDOUT.print(Text.assemble((place, "dim"), beginning), soft_wrap=True)
    plan, timing = answer.plan, answer.timing
    if plan.cache_hit is not None:
        STDOUT.print(
            f"  [dim]{escape(from_bank(plan.cache_hit))}, after {seconds(timing.total_s)}[/]", soft_wrap=True
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


_LOOKS: Final[dict[TokenOrigin, tuple[str, str]]] = {
    "exact": ("green", "stored KV that equals full attention's"),
    "reused": ("cyan", "stored KV made in another context, used as it is"),
    "recomputed": ("black on yellow", "had stored KV and was computed again"),
    "fresh": ("magenta", "had no stored KV: computed"),
}
"""Of each origin, the colour and what it means."""

# Every token is to be seen, and a text may hold what would steer a terminal: signs that Unicode has for such characters.
_VISIBLE: Final[dict[int, str | int]] = {
    **{number: 0x2400 + number for number in range(0x20)},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
    ord("\t"): "\t",
    ord("\n"): "↵\n",
}


def tell_explanation(answer: Answer, tokens: Sequence[ExplainedToken]) -> None:
    """Print everything; the prompt in full, however long it is. What came from the answer bank had none."""
    STDOUT.print()
    if answer.plan.cache_hit is not None:
        STDOUT.print(f"plan: {from_bank(answer.plan.cache_hit)}", markup=False, soft_wrap=True)
        _tell_timing(answer)
        return
    _tell_prompt(answer, tokens)
    STDOUT.print()
    _tell_origins(tokens)
    STDOUT.print()
    _tell_plan(answer)
    STDOUT.print()
    _tell_timing(answer)


def from_bank(cache_hit: AnswerCacheHit) -> str:
    """Whose answer it was, how near the question is, and since when it is known."""
    when = datetime.fromtimestamp(cache_hit.made_at_s).strftime("%Y-%m-%d %H:%M")
    return (
        f"answered from bank: {cache_hit.question!r}, similarity {cache_hit.similarity:.3f}, answered {when}"
    )


def _tell_prompt(answer: Answer, tokens: Sequence[ExplainedToken]) -> None:
    for span in answer.plan.spans:
        if span.tokens:
            STDOUT.print(Text(f"── {_named(span, answer)}", style="dim"), soft_wrap=True)
            pieces = [
                (token.text.translate(_VISIBLE), _LOOKS[token.origin][0])
                for token in tokens[span.start : span.end]
            ]
            text = Text.assemble(*pieces)
            STDOUT.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")


def _named(span: PlanSpan, answer: Answer) -> str:
    if span.kind != "chunk":
        return span.kind
    source = answer.sources[span.chunk]
    return f"chunk {span.chunk + 1} · {Path(source.document).name} [{source.start}:{source.end}]"


def _tell_origins(tokens: Sequence[ExplainedToken]) -> None:
    counts = Counter(token.origin for token in tokens)
    legend = Table(box=None, show_header=False)
    legend.add_column(justify="right")
    for origin, (colour, meaning) in _LOOKS.items():
        legend.add_row(str(counts[origin]), Text(origin, style=colour), meaning)
    STDOUT.print(legend)
    if not STDOUT.is_terminal:
        STDOUT.print("(colours are for terminals; --json says it token by token)", style="dim")


def _tell_plan(answer: Answer) -> None:
    plan = answer.plan
    budget = f"ratio {plan.ratio:g}" if plan.coverage is None else f"coverage {plan.coverage:g}"
    STDOUT.print(f"recipe {plan.recipe}, {budget}")
    table = Table("span", "tokens", "from", "recomputed", "why", box=None, header_style="bold")
    for span in plan.spans:
        name = f"chunk {span.chunk + 1}" if span.kind == "chunk" else span.kind
        origin = Text(span.origin, style=_LOOKS[span.origin][0])
        table.add_row(name, str(span.tokens), origin, str(span.recomputed_tokens), span.reason)
    STDOUT.print(table)


def _decoding(timing: Timing) -> str:
    accepted_draft_tokens = (
        f", {timing.accepted_draft_tokens} of them foretold" if timing.accepted_draft_tokens else ""
    )
    return f"decode {timing.answer_tokens} tokens{accepted_draft_tokens}"


def _tell_timing(answer: Answer) -> None:
    timing = answer.timing
    steps = [
        ("retrieve", timing.retrieve_s),
        ("tokenize", timing.tokenize_s),
        ("match and load", timing.match_s),
        ("place", timing.place_s),
        ("select", timing.select_s),
        ("recompute", timing.recompute_s),
        ("first token", timing.ttft_s),
        (_decoding(timing), timing.decode_s),
        ("total", timing.total_s),
    ]
    times = Table("step", "time", box=None, header_style="bold")
    for name, value in steps:
        times.add_row(name, seconds(value))
    STDOUT.print(times)
