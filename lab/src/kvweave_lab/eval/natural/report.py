"""The report of `kvweave eval natural`: terminal tables and JSON. Knows figures, not how they were computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvweave_lab.eval.natural.fallback import Fallback
from kvweave_lab.eval.natural.outcomes import NO_CONTEXT
from kvweave_lab.eval.natural.retrieval import DEPTHS, NEIGHBOURS, RetrievalFigures
from kvweave_lab.eval.natural.rows import Comparison, Row, gap
from kvweave_lab.eval.natural.run import NaturalResult
from kvweave_lab.report import flatten, json_bytes, margin_text, text_table, write_files
from kvweave_lab.statistics import Estimate

_NONE: Final = "–"


def content(done: NaturalResult, about: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON values: the content of natural.json."""
    return {
        "about": {
            **about,
            "left_out": done.left_out,
            "minutes": done.minutes,
            "preparation_minutes": done.preparation_minutes,
        },
        "retrieval": retrieval_json(done.retrieval),
        "rows": [flatten(row) for row in done.rows],
        "subsets": {name: [flatten(row) for row in rows] for name, rows in done.subsets.items()},
        "comparisons": [flatten(each) for each in done.comparisons],
        "fallbacks": [flatten(each) for each in done.fallbacks],
    }


def retrieval_json(figures: RetrievalFigures) -> dict[str, Any]:
    """Return the figures of retrieval as JSON values, with the depths and neighbours that their lists are about."""
    return {"depths": DEPTHS, "neighbours": NEIGHBOURS, **asdict(figures)}


def write(folder: Path, done: NaturalResult, about: dict[str, Any]) -> list[Path]:
    """Write natural.json; raises InvalidRequest if the folder cannot be written to."""
    return write_files(folder, {"natural.json": json_bytes(content(done, about))})


def tables(done: NaturalResult) -> Iterator[Table]:
    """Yield the tables: retrieval first, then the gap, the rows of each length, and the comparisons."""
    yield from retrieval_tables(done.retrieval)
    if done.rows:
        yield _gap_table(done)
        yield from (
            _rows_table([row for row in done.rows if row.context_tokens == length])
            for length in dict.fromkeys(row.context_tokens for row in done.rows)
        )
    if done.comparisons:
        yield _comparison_table(done.comparisons)
    if done.fallbacks:
        yield _fallback_table(done.fallbacks)


def retrieval_tables(figures: RetrievalFigures) -> Iterator[Table]:
    """Yield what retrieval finds, how often neighbours are retrieved together, and what a changed document costs."""
    title = f"Evidence found, {figures.questions} questions, {figures.library_chunks:,} chunks"
    table = text_table(("ranking", *(f"recall@{depth}" for depth in DEPTHS), "MRR"), title=title)
    for ranking in figures.rankings:
        table.add_row(ranking.name, *map(_text, ranking.recall), _text(ranking.mrr))
    yield table
    columns = ("context", "tokens", "chunks", "all evidence", "evidence", "own documents")
    table = text_table(columns, title="What the contexts hold")
    for each in figures.contexts:
        table.add_row(
            f"{each.context_tokens:,}",
            f"{each.tokens:,.0f}",
            f"{each.chunks:.1f}",
            _text(each.complete),
            _text(each.evidence),
            f"{each.own:.3f}",
        )
    yield table
    yield _together_table(figures)
    yield _change_table(figures)


def _together_table(figures: RetrievalFigures) -> Table:
    columns = (
        "context",
        *(f"any of {count}" for count in NEIGHBOURS),
        *(f"of {count}" for count in NEIGHBOURS),
        "by chance",
        "chunk before",
    )
    caption = "any of N: chunks with one of their N nearest neighbours in the same context · of N: share of these neighbours"
    table = text_table(columns, title="Neighbours retrieved together", caption=caption)
    for each in figures.contexts:
        shares = [f"{share.value:.3f}" for share in (*each.any_together, *each.together)]
        before = f"{each.previous.value:.3f}" if each.previous is not None else _NONE
        table.add_row(f"{each.context_tokens:,}", *shares, f"{each.by_chance:.4f}", before)
    return table


def _change_table(figures: RetrievalFigures) -> Table:
    columns = ("chunks of the document", *(f"of others, {count} nearest" for count in NEIGHBOURS))
    table = text_table(columns, title="Chunks to be computed again when a document changes")
    change = figures.change
    table.add_row(*(f"{each.value:.1f}" for each in (change.own, *change.others)))
    return table


def _gap_table(done: NaturalResult) -> Table:
    columns = (
        "context",
        "prompts",
        "NLL full",
        "reuse",
        "no context",
        "KL reuse",
        "same first",
        "F1 full",
        "F1 reuse",
    )
    table = text_table(columns, title="The gap between full attention and reuse")
    for name, rows in (("", done.rows), *((f", {name}", rows) for name, rows in done.subsets.items())):
        for length in dict.fromkeys(row.context_tokens for row in rows):
            full, reuse, alone = gap(rows, length)
            table.add_row(
                f"{length:,}{name}",
                f"{full.prompts}",
                _text(full.nll),
                _text(reuse.nll),
                _text(alone.nll),
                _text(reuse.kl, 4),
                _text(reuse.same_first),
                _text(full.f1),
                _text(reuse.f1),
            )
    return table


def _rows_table(rows: Sequence[Row]) -> Table:
    columns = ("recipe", "preparation", "storage", "budget", "B/token", "passes", "computed", "NLL", "KL")
    more = ("1st KL", "same 1st", "NLL rec.", "KL rec.", "PGR", "time")
    answered = any(row.same_answer is not None for row in rows)
    answers = ("F1", "right", "kept right", "same", "same tokens", "answer KL", "F1 PGR") if answered else ()
    caption = (
        "± half of the 95 % interval · rec.: share of the gap between reuse and full attention · PGR: of that to no context"
        " · time: to the first token, full attention's is 1 · same: as full attention · kept right: of its right answers"
    )
    title = f"{rows[0].context_tokens:,} tokens of context, {rows[0].prompts} prompts"
    table = text_table((*columns, *more, *answers), names=3, title=title, caption=caption)
    for row in rows:
        shares = (row.nll_recovery, row.kl_recovery, row.nll_pgr)
        table.add_row(
            escape(row.recipe if row.recipe == NO_CONTEXT else row.method),
            row.preparation or _NONE,
            row.storage,
            _budget(row.ratio, row.coverage),
            _number(row.bytes_per_token, ",.0f"),
            _number(row.offline_passes, ".2f"),
            f"{row.rows.value:,.0f}",
            _text(row.nll),
            _text(row.kl, 4),
            _text(row.first_kl, 4),
            f"{row.same_first.value:.3f}",
            *(_text(share, 2) for share in shares),
            _text(row.time),
            *map(
                _text, (row.f1, row.contains, row.kept_right, row.same_answer, row.agreed) if answers else ()
            ),
            *((_text(row.answer_kl, 4), _text(row.f1_pgr, 2)) if answers else ()),
        )
    return table


def _comparison_table(found: Sequence[Comparison]) -> Table:
    columns = ("equal", "", "recipe", "against", "context", "budget", "NLL", "KL")
    caption = "recipe − against, with the 95 % interval over prompts; below 0, the recipe is nearer to the answer or to full attention"
    table = text_table(columns, names=4, title="Compared prompt by prompt", caption=caption)
    for each in found:
        table.add_row(
            each.by,
            escape(each.group),
            escape(each.recipe),
            escape(each.against),
            f"{each.context_tokens:,}",
            _budget(each.ratio, each.coverage),
            _interval(each.nll, 3),
            _interval(each.kl, 4),
        )
    return table


def _fallback_table(found: Sequence[Fallback]) -> Table:
    columns = ("recipe", "context", "budget", "margin", "same", "fell back", "time", "prefill")
    caption = (
        "margin: a token that leads by less calls for full prefill, once · same: answers that are full attention's · time: to"
        " the first token · prefill: and what falling back took; full attention's is 1"
    )
    table = text_table(columns, names=1, title="With a fallback to full prefill", caption=caption)
    for each in found:
        shares = (each.same_answer, each.fell_back, each.time, each.prefill)
        budget = _budget(each.ratio, each.coverage)
        table.add_row(
            escape(each.recipe), f"{each.context_tokens:,}", budget, f"{each.margin:g}", *map(_text, shares)
        )
    return table


def _budget(ratio: float | None, coverage: float | None) -> str:
    if ratio is not None:
        return f"{ratio:g}"
    return _NONE if coverage is None else f"{coverage:g} of scores"


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else f"{value:{form}}"


def _text(estimate: Estimate | None, digits: int = 3) -> str:
    return _NONE if estimate is None else f"{estimate.value:.{digits}f} {margin_text(estimate, digits)}"


def _interval(estimate: Estimate, digits: int) -> str:
    form: Callable[[float], str] = lambda value: f"{value:+.{digits}f}"  # noqa: E731
    return f"{form(estimate.value)} ({form(estimate.low)} to {form(estimate.high)})"
