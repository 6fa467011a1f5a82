"""ask and search: answer a question with sources, and show the passages that it finds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import echo
from kvweave.errors import ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from kvweave.options import AskKeywords
    from kvweave.results import Answer, ExplainedToken, FoundPassage
    from kvweave.server.choice import ServerChoice

    Answered: TypeAlias = tuple[Answer, Sequence[ExplainedToken]]

_SHOWN_LETTERS: Final = 300


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "system",
    *opt.REUSE,
    *("ratio", "coverage", "top_k"),
    *("max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    "use_server",
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
    from kvweave.server.choice import IN_REQUEST, choose_server

    ratio, coverage = options.budget(context)
    given: AskKeywords = {
        "ratio": ratio,
        "coverage": coverage,
        "top_k": options.top_k,
        "drop_chunks": drop_chunks,
        "cache": "refresh" if fresh else "use",
    }
    server = choose_server(options.config(), IN_REQUEST)
    answered = None
    if server.client is not None:
        answered = _ask_server(server, options.kb, question, given, explain=explain, quiet=json)
    if answered is None:
        answered = _ask_here(options, question, given, explain=explain, quiet=json)
    _print_answer(*answered, server, explain=explain, json=json)


def _ask_here(
    options: opt.SharedOptions, question: str, given: "AskKeywords", *, explain: bool, quiet: bool
) -> "Answered":
    """Answer in this process; print the pieces unless `quiet`."""
    with options.open_kb() as base:
        stream = base.stream(question, **given)
        for piece in stream:
            if not quiet:
                echo(piece, end="")
        return stream.answer, stream.explain() if explain else ()


def _ask_server(
    server: "ServerChoice", kb: str, question: str, given: "AskKeywords", *, explain: bool, quiet: bool
) -> "Answered | None":
    """Ask the running server; print the pieces unless `quiet`. Return None if this process must answer."""
    assert server.client is not None
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    explaining = {"explain": True} if explain else {}
    printed = False

    def show(piece: str) -> None:
        nonlocal printed
        if not quiet:
            echo(piece, end="")
            printed = True

    try:
        with server.client:
            return server.client.ask(kb, question, {**server.options, **wanted, **explaining}, show)
    except (ServerUnavailable, ServerRefused) as error:
        if printed:
            raise ServerUnavailable(f"{error}; the answer above is incomplete: ask again") from error
        # The server may refuse a request that works in this process, whose errors also have more detail.
        server.give_up(error)
        return None


def _print_answer(
    answer: "Answer",
    tokens: "Sequence[ExplainedToken]",
    server: "ServerChoice",
    *,
    explain: bool,
    json: bool,
) -> None:
    """Print the sources and the plan after the text, or everything as JSON."""
    from kvweave.cli.output import print_json
    from kvweave.results import facts

    if json:
        used = {"server": server.facts()} if server.url and (explain or not server.unused) else {}
        print_json({**facts(answer), **({"tokens": tokens} if explain else {}), **used})
        return
    echo()
    _print_sources(answer)
    if explain:
        from kvweave.cli.explain import print_explanation

        print_explanation(answer, tokens)
        if server.line:
            echo(server.line)


def _print_sources(answer: "Answer") -> None:
    from rich.markup import escape
    from rich.text import Text

    from kvweave.cli.explain import describe_cache_hit
    from kvweave.cli.output import STDOUT, amount, place, seconds, share

    STDOUT.print()
    for source in answer.sources:
        title = f"  {source.document} [{source.start}:{source.end}]{place(source)}  "
        beginning = " ".join(source.text.split())[:80]
        STDOUT.print(Text.assemble((title, "dim"), beginning), soft_wrap=True)
    plan, timing = answer.plan, answer.timing
    if plan.cache_hit is not None:
        STDOUT.print(
            f"  [dim]{escape(describe_cache_hit(plan.cache_hit))}, after {seconds(timing.total_s)}[/]",
            soft_wrap=True,
        )
        return
    STDOUT.print(
        f"  [dim]{share(plan.reused_share)} of {plan.prompt_tokens} prompt tokens reused, "
        f"{plan.fresh_tokens + plan.recomputed_tokens} computed; first token after {seconds(timing.ttft_s)}[/]",
        soft_wrap=True,
    )
    decoding = answer.decoding
    if decoding is not None:
        STDOUT.print(
            f"  [dim]decoded with at most {amount(decoding.resident_bytes)} of KV in memory; each token read "
            f"{amount(decoding.bytes_per_token)} from {decoding.reads_per_token:.1f} places[/]"
        )


@opt.with_options(*opt.KB, "embedding_model", "reranker", "top_k", top_k="Passages to show. Default: 5.")
def search(
    question: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    *,
    options: opt.SharedOptions,
    json: opt.Json = False,
) -> None:
    """Show the passages that a question would be answered from, with scores and why. Loads no language model."""
    from kvweave.cli.output import print_json
    from kvweave.results import facts

    with options.open_kb() as base:  # report a missing knowledge base before seconds of imports
        found = base.explained_passages(question, options.top_k)
    if json:
        print_json([{"source": each.source, **facts(each)} for each in found])
        return
    for number, passage in enumerate(found, 1):
        _print_passage(number, passage)


def _print_passage(number: int, passage: "FoundPassage") -> None:
    from kvweave.cli.output import place, say

    source = passage.source
    title = (
        f"{number}  {source.document} [{source.start}:{source.end}]{place(source)}  score {source.score:.4f}"
    )
    say(title)
    say(f"   {'; '.join(_reasons(passage))}", style="dim")
    text = " ".join(source.text.split())
    shown = text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS].rstrip() + " \u2026"
    say(f"   {shown}")


def _reasons(passage: "FoundPassage") -> list[str]:
    """Return the reasons why a passage was found, as text."""
    words = ", ".join(passage.words) or "none in it"
    no_vector = "none yet" if passage.lacks_vector else "not among the nearest"
    by_words, by_vectors = passage.word_rank, passage.vector_rank
    reasons = [
        f"words: place {by_words}, BM25 {passage.bm25:.2f} ({words})"
        if by_words
        else "words: not found by them",
        f"vectors: place {by_vectors}, cosine {passage.cosine:.3f}"
        if by_vectors
        else f"vectors: {no_vector}",
    ]
    if passage.all_words:
        reasons.append("holds every word")
    if passage.quotes:
        reasons.append("holds " + ", ".join(repr(quote) for quote in passage.quotes))
    if passage.rerank_score is not None:
        reasons.append(f"reranker {passage.rerank_score:.3f}")
    return reasons
