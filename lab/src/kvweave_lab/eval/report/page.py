"""The evaluation's HTML page: headline figures, tables with every row, figures, and what the columns mean."""

from collections.abc import Iterable, Sequence
from html import escape

from kvweave_lab.eval.comparisons import Cell, Matrix, StorageCost
from kvweave_lab.eval.outcomes import REUSE
from kvweave_lab.eval.report import About, verdict_sentences
from kvweave_lab.eval.report.figures import Picture
from kvweave_lab.eval.rows import (
    Row,
    context_lengths,
    length_text,
    overall_rows,
    panel_names,
    rows_at_length,
    rows_by_series,
    series_names,
    task_names,
)
from kvweave_lab.report import few_prompts_warning, half_width, margin_text
from kvweave_lab.report.figures import DARK, LIGHT, series_styles
from kvweave_lab.report.page import Page, html_figure, render_page, wide_card
from kvweave_lab.statistics import Estimate

_NONE = '<td class="none">–</td>'


def report_page(
    rows: Sequence[Row],
    about: About,
    pictures: Sequence[Picture],
    matrices: Sequence[Matrix] = (),
    storages: Sequence[StorageCost] = (),
) -> str:
    """Return the whole document."""
    lengths = (_length_section(rows, each, pictures, matrices) for each in context_lengths(rows))
    return render_page(
        Page(
            title="Answer quality with reused KV",
            model=about.model,
            summary=_summary(rows),
            headline=_headline(rows),
            facts=_facts(about),
            sections=[_overall_section(rows), *_storage_sections(storages), *lengths],
            definitions=_DEFINITIONS,
            repeat_note=(
                "The same command gives the same prompts. Every figure of this page is in <code>rows.json</code> beside it."
            ),
            command=about.command,
            version=about.version,
            date=about.date,
        )
    )


def _summary(rows: Sequence[Row]) -> str:
    return (
        f"<b>{_count(len(series_names(rows)), 'recipe')}</b> on <b>{_count(len(task_names(rows)), 'task')}</b>,"
        f" compared with full attention on the same prompts: what is lost by reusing KV of chunks that never saw"
        f" each other, and how much of it comes back by recomputing some of their tokens."
    )


def _headline(rows: Sequence[Row]) -> str:
    """Return the warning about few prompts, and full attention and reuse length by length."""
    warning = few_prompts_warning(min(row.samples for row in rows))
    numbers = "\n".join(
        f'<div class="card"><span class="where">{escape(length_text(row.context_tokens))}</span>'
        f'<div class="pair">{_big(row.full_score, "full attention")}{_big(row.score, "reuse")}'
        f"{_big(row.lost, 'lost by reuse')}</div></div>"
        for row in overall_rows(rows)
        if (row.recipe, row.ratio) == (REUSE, 0)
    )
    noted = f'<p class="note warn">{warning}</p>' if warning else ""
    return f'{noted}\n<div class="numbers">\n{numbers}\n</div>'


def _big(estimate: Estimate, name: str) -> str:
    lines = (("big", f"{estimate.value:.3f}"), ("what", name), ("what", f"±{half_width(estimate):.3f}"))
    return "<div>" + "".join(f'<span class="{kind}">{text}</span>' for kind, text in lines) + "</div>"


def _facts(about: About) -> list[tuple[str, str]]:
    lengths = " · ".join(f"{tokens:,}" for tokens in about.context_tokens)
    left_out = f"{_count(about.left_out, 'prompt')}, too long for the model"
    return [
        ("model", about.model),
        ("dtype", about.dtype),
        ("device", about.device),
        *(_generated_facts(about) if about.seeds else _file_facts(about)),
        *([("left out", left_out)] if about.left_out else []),
        ("context", f"{lengths} tokens" if lengths else "as in the file"),
        ("chunks", f"at most {about.chunk_tokens:,} tokens"),
        ("date", about.date),
        ("kvweave", about.version),
        ("time, processes added up", f"{about.minutes:.1f} minutes"),
    ]


def _generated_facts(about: About) -> list[tuple[str, str]]:
    return [
        ("split", about.split),
        ("seeds" if len(about.seeds) > 1 else "seed", ", ".join(map(str, about.seeds))),
        ("prompts per task", f"{about.samples:,} per length and seed"),
    ]


def _file_facts(about: About) -> list[tuple[str, str]]:
    how_many = "all of the file" if about.samples is None else f"the first {about.samples:,} of a file"
    return [("file", about.split), ("prompts", how_many)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _overall_section(rows: Sequence[Row]) -> str:
    return (
        '<h2>Overall</h2>\n<p class="note">The mean over tasks, with half the width of the 95 % interval after ±. On the'
        " scale, the band is the interval and the dashed mark full attention.</p>\n"
        + wide_card(_overall_table(rows))
    )


def _storage_sections(costs: Sequence[StorageCost]) -> list[str]:
    if not costs:
        return []
    note = "Each recipe beside itself with exact storage, on the same prompts."
    return [f'<h2>Chunk KV in fewer bits</h2><p class="note">{note}</p>' + wide_card(_storages_table(costs))]


def _length_section(
    rows: Sequence[Row], context_tokens: int, pictures: Sequence[Picture], matrices: Sequence[Matrix]
) -> str:
    name = length_text(context_tokens)
    return "\n".join(
        [
            f"<h2>{escape(name[0].upper() + name[1:])}</h2>",
            '<p class="note">Score per task; the stronger the shade, the higher.</p>',
            wide_card(_task_table(rows_at_length(rows, context_tokens))),
            *(_matrix_section(matrix) for matrix in matrices if matrix.context_tokens == context_tokens),
            *(
                html_figure(picture.light, picture.title, dark=picture.dark, caption=picture.caption)
                for picture in pictures
                if picture.context_tokens == context_tokens
            ),
        ]
    )


def _matrix_section(matrix: Matrix) -> str:
    note = "; ".join(
        [
            f"Mean over tasks by selector and preparation at ratio {matrix.ratio:g}",
            "n: normalised score",
            "with a sign: the difference from the same selector on isolated chunks, prompt by prompt",
            *verdict_sentences(matrix),
        ]
    )
    return f'<p class="note">{escape(note)}.</p>' + wide_card(_matrix_table(matrix))


_MEASURES = "normalised agreement KL faithful computed selection prompts".split()


def _overall_table(rows: Sequence[Row]) -> str:
    """Return every measure of every recipe and budget by length, with a scale that shows score and interval."""
    groups = _SeriesGroups(series_names(rows))
    scale = '<th class="where"><span class="ends"><span>0</span><span>1</span></span></th>'
    heads = "".join(f"<th>{head}</th>" for head in _MEASURES)
    names = '<th class="recipe">recipe</th><th>budget</th><th>score</th>'
    parts = [f"<table><thead><tr>{names}{scale}{heads}</tr></thead>"]
    for context_tokens in context_lengths(rows):
        overall = overall_rows(rows_at_length(rows, context_tokens))
        if not overall:
            continue
        label = escape(length_text(context_tokens))
        parts.append(f'<tbody><tr class="length"><th colspan="11">{label}</th></tr></tbody>')
        parts += [
            groups.html(points, [_measures(row) for row in points])
            for points in rows_by_series(overall).values()
        ]
    return "\n".join([*parts, "</table>"])


def _measures(row: Row) -> str:
    return "".join(
        [
            _measure(row.score),
            _scale(row),
            _NONE if row.normalised is None else _measure(row.normalised),
            _measure(row.agreement),
            _measure(row.kl),
            _measure(row.faithfulness),
            f"<td>{row.rows.value:,.0f}<small>±{half_width(row.rows):,.0f}</small></td>",
            _NONE if row.selection is None else _measure(row.selection, 2),
            f"<td>{row.samples:,}</td>",
        ]
    )


def _measure(estimate: Estimate, digits: int = 3) -> str:
    return f"<td>{_value(estimate, digits)}</td>"


def _value(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f}<small>{margin_text(estimate, digits)}</small>"


def _scale(row: Row) -> str:
    score, full = row.score, row.full_score
    at = f"--low:{score.low:.4f};--high:{score.high:.4f};--score:{score.value:.4f};--full:{full.value:.4f}"
    return f'<td class="where"><span class="track" style="{at}"><u></u><i></i><b></b></span></td>'


def _task_table(rows: Sequence[Row]) -> str:
    """Return rows of one length: a line per recipe and budget, a column per task."""
    groups = _SeriesGroups(series_names(rows))
    names = panel_names(rows)
    heads = "".join(f'<th class="task">{escape(name)}</th>' for name in names)
    parts = [f'<table><thead><tr><th class="recipe">recipe</th><th>budget</th>{heads}</tr></thead>']
    cells = {(row.series, row.budget, row.task): row for row in rows}
    for series, points in rows_by_series(rows).items():
        first = {row.budget: row for row in reversed(points)}
        lines = [
            "".join(_shaded(cells.get((series, budget, name))) for name in names) for budget in sorted(first)
        ]
        parts.append(groups.html([first[budget] for budget in sorted(first)], lines))
    return "\n".join([*parts, "</table>"])


def _shaded(row: Row | None) -> str:
    return _NONE if row is None else _shaded_cell(row.score, _value(row.score, 2))


def _shaded_cell(score: Estimate, text: str) -> str:
    return f'<td class="heat" style="--score:{score.value:.3f}">{text}</td>'


def _matrix_table(matrix: Matrix) -> str:
    """Return a line per selector, a column per preparation: score, normalised score, gain over isolated chunks."""
    heads = "".join(f'<th class="task">{escape(name)}</th>' for name in matrix.preparations)
    parts = [f'<table><thead><tr><th class="recipe">selector</th>{heads}</tr></thead>']
    for selector in matrix.selectors:
        cells = "".join(_matrix_cell(matrix.cell(selector, name)) for name in matrix.preparations)
        parts.append(f'<tbody><tr><th class="recipe" scope="row">{escape(selector)}</th>{cells}</tr></tbody>')
    return "\n".join([*parts, "</table>"])


def _matrix_cell(cell: Cell | None) -> str:
    if cell is None:
        return _NONE
    more = []
    if cell.normalised is not None:
        more.append(f"n {cell.normalised.value:.2f}{margin_text(cell.normalised, 2)}")
    if cell.gain is not None:
        more.append(f"{cell.gain.value:+.3f}{margin_text(cell.gain, 3)}")
    below = "".join(f"<br><small>{part}</small>" for part in more)
    return _shaded_cell(cell.score, _value(cell.score, 3) + below)


def _storages_table(costs: Sequence[StorageCost]) -> str:
    """Return a line per length, recipe, budget and storage: scores, what is lost, and the share of equal answers."""
    names = "".join(f'<th class="recipe">{name}</th>' for name in ("recipe", "context"))
    heads = "".join(
        f"<th>{name}</th>" for name in ("budget", "storage", "exact", "score", "lost", "same", "prompts")
    )
    parts = [f"<table><thead><tr>{names}{heads}</tr></thead><tbody>"]
    for cost in costs:
        budget = f"{cost.ratio:g}" if cost.coverage is None else f"{cost.coverage:g} by coverage"
        measured = "".join(_measure(part) for part in (cost.exact_score, cost.score, cost.lost, cost.same))
        parts.append(
            f'<tr><th class="recipe" scope="row">{escape(cost.recipe)}</th>'
            f"<td>{escape(length_text(cost.context_tokens))}</td><td>{budget}</td><td>{cost.storage}</td>"
            f"{measured}<td>{cost.samples:,}</td></tr>"
        )
    return "\n".join([*parts, "</tbody></table>"])


class _SeriesGroups:
    """A series' lines in a table, marked with its colours in the figures."""

    def __init__(self, names: Sequence[str]) -> None:
        self._light = series_styles(names, LIGHT)
        self._dark = series_styles(names, DARK)

    def html(self, points: Sequence[Row], lines: Iterable[str]) -> str:
        """Return the series' name once, then for every budget the cells in `lines`."""
        series = points[0].series
        light, dark = self._light[series], self._dark[series]
        dot = f'<span class="{"dot" if light.filled else "dot hollow"}"></span>'
        head = f'<th class="recipe" scope="rowgroup" rowspan="{len(points)}">{dot}{escape(series)}</th>'
        budgets = [f"<td>{row.budget:g}</td>{cells}" for row, cells in zip(points, lines, strict=True)]
        body = "</tr>\n<tr>".join(budgets)
        return f'<tbody style="--at-light:{light.color};--at-dark:{dark.color}"><tr>{head}{body}</tr></tbody>'


_DEFINITIONS = (
    (
        "recipe",
        "how the prompt's KV was obtained; full attention computes every token, reuse takes chunks as they were prepared"
        " on their own",
    ),
    (
        "budget",
        "the share of the reused context tokens that the recipe was asked to recompute (its ratio); of a recipe “by"
        " coverage”, the share of all scores that the recomputed tokens were asked to hold. The actual number is under"
        " “computed”",
    ),
    (
        "score",
        "how much of the reference answer the generated answer holds, from 0 to 1, by the task's own metric",
    ),
    (
        "normalised",
        "the part of the way from reuse to full attention: (score − reuse) / (full − reuse), as in FusionRAG eq. 11. Left"
        " out where full attention gains less than 0.1 over reuse. Overall it is the ratio of means over the tasks that"
        " gain at least that much",
    ),
    ("agreement", "the share of answers that equal full attention's, right or wrong"),
    (
        "KL",
        "how far the first token's distribution is from full attention's, in nats; 0 is the same",
    ),
    ("faithful", "the share of an answer's facts that the context contains"),
    (
        "computed",
        "the context tokens computed per prompt, on average: those computed again and those for which nothing was stored."
        " Neither the system prefix nor the question counts; full attention computes the whole context",
    ),
    (
        "selection",
        "of the stale tokens that were computed again, the share that are among the equally many stale tokens to which"
        " the question attends most under full attention",
    ),
    (
        "lost, same",
        "with chunk KV in fewer bits: the score that is lost to exact storage, and the share of answers that are word for"
        " word the same",
    ),
    ("prompts", "the number of prompts in a row; every recipe answers the same ones"),
    (
        "intervals",
        "95 %, by a bootstrap over prompts, paired where two recipes are compared (normalised, what is lost by reuse);"
        " after ± is half the width. Prompts that all score alike leave no width: 200 of 200 right still allow a true"
        " score down to 0.985",
    ),
)
