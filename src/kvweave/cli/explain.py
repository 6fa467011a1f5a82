"""ask --explain: the prompt in the colours of where its KV came from, the plan span by span, and the time."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from kvweave.cli.show import STDOUT, seconds
from kvweave.core import Answer, Banked, ExplainedToken, PlanSpan, Timing, TokenOrigin

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
    if answer.plan.banked is not None:
        STDOUT.print(f"plan: {from_bank(answer.plan.banked)}", markup=False, soft_wrap=True)
        _tell_timing(answer)
        return
    _tell_prompt(answer, tokens)
    STDOUT.print()
    _tell_origins(tokens)
    STDOUT.print()
    _tell_plan(answer)
    STDOUT.print()
    _tell_timing(answer)


def from_bank(banked: Banked) -> str:
    """Whose answer it was, how near the question is, and since when it is known."""
    when = datetime.fromtimestamp(banked.made_at_s).strftime("%Y-%m-%d %H:%M")
    return f"answered from bank: {banked.question!r}, similarity {banked.similarity:.3f}, answered {when}"


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
    foretold = f", {timing.foretold_tokens} of them foretold" if timing.foretold_tokens else ""
    return f"decode {timing.answer_tokens} tokens{foretold}"


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
