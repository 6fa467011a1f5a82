"""Prints the explanation of `ask --explain`: the prompt coloured by origin, the plan, and the times."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from kvweave.cli.output import STDOUT, say, seconds
from kvweave.cli.terminal import harmless
from kvweave.results import Answer, AnswerCacheHit, ExplainedToken, PlanSpan, TokenOrigin

_STYLES: Final[dict[TokenOrigin, tuple[str, str]]] = {
    "exact": ("green", "stored KV that equals full attention's"),
    "reused": ("cyan", "stored KV computed in another context, used unchanged"),
    "recomputed": ("black on yellow", "had stored KV and was recomputed"),
    "fresh": ("magenta", "had no stored KV: computed"),
}
"""The colour and the meaning of each origin."""


def print_explanation(answer: Answer, tokens: Sequence[ExplainedToken]) -> None:
    """Print the prompt, the plan and the times of an answer; a cached answer has no prompt."""
    STDOUT.print()
    if answer.plan.cache_hit is not None:
        say(f"plan: {describe_cache_hit(answer.plan.cache_hit)}")
        _print_timing(answer)
        return
    _print_prompt(answer, tokens)
    if answer.reasoning:
        STDOUT.print(Text("── thoughts", style="dim"))
        STDOUT.print(Text(answer.reasoning), soft_wrap=True)
    STDOUT.print()
    _print_origins(tokens)
    STDOUT.print()
    _print_plan(answer)
    STDOUT.print()
    _print_timing(answer)


def describe_cache_hit(cache_hit: AnswerCacheHit) -> str:
    """Describe a cached answer: its question, the similarity of the questions, and the time of the answer."""
    when = datetime.fromtimestamp(cache_hit.made_at_s).strftime("%Y-%m-%d %H:%M")
    judged = (
        "" if cache_hit.judged is None else f", judged to ask the same with a score of {cache_hit.judged:.1f}"
    )
    return (
        f"cached answer to {cache_hit.question!r}, similarity {cache_hit.similarity:.3f}{judged}, from {when}"
    )


def _print_prompt(answer: Answer, tokens: Sequence[ExplainedToken]) -> None:
    for span in answer.plan.spans:
        if span.tokens:
            STDOUT.print(Text(f"── {_title(span, answer)}", style="dim"), soft_wrap=True)
            pieces = [
                (harmless(token.text).replace("\n", "↵\n"), _STYLES[token.origin][0])
                for token in tokens[span.start : span.end]
            ]
            text = Text.assemble(*pieces)
            STDOUT.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")


def _title(span: PlanSpan, answer: Answer) -> str:
    if span.kind != "chunk":
        return span.kind
    source = answer.sources[span.chunk]
    return f"chunk {span.chunk + 1} · {Path(source.document).name} [{source.start}:{source.end}]"


def _print_origins(tokens: Sequence[ExplainedToken]) -> None:
    counts = Counter(token.origin for token in tokens)
    legend = Table(box=None, show_header=False)
    legend.add_column(justify="right")
    for origin, (colour, meaning) in _STYLES.items():
        legend.add_row(str(counts[origin]), Text(origin, style=colour), meaning)
    STDOUT.print(legend)
    if not STDOUT.is_terminal:
        STDOUT.print("(colours need a terminal; --json lists every token)", style="dim")


def _print_plan(answer: Answer) -> None:
    plan = answer.plan
    budget = f"ratio {plan.ratio:g}" if plan.coverage is None else f"coverage {plan.coverage:g}"
    STDOUT.print(f"recipe {plan.recipe}, {budget}")
    if plan.auto:
        say(f"auto is {plan.auto}")
    if plan.without_vector:
        say(f"{plan.without_vector} chunks have no vector yet: words alone could find them")
    if plan.fallback_at is not None:
        say(
            f"the prompt was computed in full before token {plan.fallback_at + 1} of the answer, which was open"
        )
    table = Table("span", "tokens", "from", "recomputed", "why", box=None, header_style="bold")
    for span in plan.spans:
        name = f"chunk {span.chunk + 1}" if span.kind == "chunk" else span.kind
        origin = Text(span.origin, style=_STYLES[span.origin][0])
        table.add_row(name, str(span.tokens), origin, str(span.recomputed_tokens), span.reason)
    STDOUT.print(table)


def _print_timing(answer: Answer) -> None:
    timing = answer.timing
    accepted = timing.accepted_draft_tokens
    drafts = f", {accepted} of them accepted from drafts" if accepted else ""
    steps = [
        ("judge", timing.judge_s),
        ("retrieve", timing.retrieve_s),
        ("tokenize", timing.tokenize_s),
        ("match and load", timing.match_s),
        ("place", timing.place_s),
        ("select", timing.select_s),
        ("recompute", timing.recompute_s),
        ("first token", timing.ttft_s),
        (f"decode {timing.answer_tokens} tokens{drafts}", timing.decode_s),
        ("total", timing.total_s),
    ]
    times = Table("step", "time", box=None, header_style="bold")
    for name, value in steps:
        times.add_row(name, seconds(value))
    STDOUT.print(times)
