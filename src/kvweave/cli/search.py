"""search: the passages that a question finds, with scores and reasons."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.results import FoundPassage

_SHOWN_LETTERS: Final = 300


@opt.with_options(*opt.KB, "embedding_model", "reranker", "top_k", top_k="Passages to show. Default: 5.")
def search(
    question: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    *,
    options: opt.SharedOptions,
    json: opt.Json = False,
) -> None:
    """Show the passages that a question would be answered from, with scores and why. Loads no language model."""
    from kvweave.cli.output import print_json
    from kvweave.facts import facts

    with options.open_kb() as base:  # report a missing knowledge base before seconds of imports
        found = base.explained_passages(question, options.top_k)
    if json:
        print_json([{"source": each.source, **facts(each)} for each in found])
        return
    for number, passage in enumerate(found, 1):
        _show(number, passage)


def _show(number: int, passage: "FoundPassage") -> None:
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
