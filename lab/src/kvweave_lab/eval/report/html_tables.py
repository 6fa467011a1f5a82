"""The report's tables as HTML: rows in, markup out."""

from collections.abc import Mapping, Sequence
from html import escape

from kvweave_lab.eval.matrix import Cell, Matrix
from kvweave_lab.eval.quantisation import StorageCost
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.style import DARK, LIGHT, Look, looks
from kvweave_lab.eval.results import Estimate, Row

_MEASURES = "normalised agreement KL faithful computed selection prompts".split()
_NONE = '<td class="none">–</td>'


def overall_table(rows: Sequence[Row]) -> str:
    """Every measure of every recipe and budget, length by length, with a scale that shows score and interval."""
    dots = Dots(slices.recipes(rows))
    scale = '<th class="where"><span class="ends"><span>0</span><span>1</span></span></th>'
    heads = "".join(f"<th>{head}</th>" for head in _MEASURES)
    names = '<th class="recipe">recipe</th><th>budget</th><th>score</th>'
    parts = [f"<table><thead><tr>{names}{scale}{heads}</tr></thead>"]
    for context_tokens in slices.lengths(rows):
        here = slices.overall(slices.at_length(rows, context_tokens))
        if not here:
            continue
        label = escape(slices.length_named(context_tokens))
        parts.append(f'<tbody><tr class="length"><th colspan="11">{label}</th></tr></tbody>')
        parts += [
            dots.group(points, [_measures(row) for row in points])
            for points in slices.by_recipe(here).values()
        ]
    return "\n".join([*parts, "</table>"])


def task_table(rows: Sequence[Row]) -> str:
    """Rows of one length: a line per recipe and budget, a column per task."""
    dots = Dots(slices.recipes(rows))
    names = slices.panels(rows)
    heads = "".join(f'<th class="task">{escape(name)}</th>' for name in names)
    parts = [f'<table><thead><tr><th class="recipe">recipe</th><th>budget</th>{heads}</tr></thead>']
    cells = {(row.series, row.budget, row.task): row for row in rows}
    for recipe, points in slices.by_recipe(rows).items():
        first = {row.budget: row for row in reversed(points)}
        lines = [
            "".join(_heat(cells.get((recipe, budget, name))) for name in names) for budget in sorted(first)
        ]
        parts.append(dots.group([first[budget] for budget in sorted(first)], lines))
    return "\n".join([*parts, "</table>"])


def preparation_table(matrix: Matrix) -> str:
    """A line per selector, a column per preparation: score, normalised score, and what is gained over isolated chunks."""
    heads = "".join(f'<th class="task">{escape(name)}</th>' for name in matrix.preparations)
    parts = [f'<table><thead><tr><th class="recipe">selector</th>{heads}</tr></thead>']
    for selector in matrix.selectors:
        cells = "".join(_crossing(matrix.cell(selector, name)) for name in matrix.preparations)
        parts.append(f'<tbody><tr><th class="recipe" scope="row">{escape(selector)}</th>{cells}</tr></tbody>')
    return "\n".join([*parts, "</table>"])


def storages_table(costs: Sequence[StorageCost]) -> str:
    """A line per length, recipe, budget and storage: the scores, what is lost, and how many answers stay the same."""
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
            f"<td>{escape(slices.length_named(cost.context_tokens))}</td><td>{budget}</td><td>{cost.storage}</td>"
            f"{measured}<td>{cost.samples:,}</td></tr>"
        )
    return "\n".join([*parts, "</tbody></table>"])


class Dots:
    """A recipe's colours in the figures, for its lines in the tables."""

    def __init__(self, recipes: Sequence[str]) -> None:
        self._light: Mapping[str, Look] = looks(recipes, LIGHT)
        self._dark: Mapping[str, Look] = looks(recipes, DARK)

    def group(self, points: Sequence[Row], lines: Sequence[str]) -> str:
        """One recipe: its name once, then for every budget the cells in `lines`."""
        recipe = points[0].series
        light, dark = self._light[recipe], self._dark[recipe]
        dot = f'<span class="{"dot" if light.filled else "dot hollow"}"></span>'
        head = f'<th class="recipe" scope="rowgroup" rowspan="{len(points)}">{dot}{escape(recipe)}</th>'
        budgets = [f"<td>{row.budget:g}</td>{cells}" for row, cells in zip(points, lines, strict=True)]
        body = "</tr>\n<tr>".join(budgets)
        return f'<tbody style="--at-light:{light.color};--at-dark:{dark.color}"><tr>{head}{body}</tr></tbody>'


def _measures(row: Row) -> str:
    return "".join(
        [
            _measure(row.score),
            _track(row),
            _NONE if row.normalised is None else _measure(row.normalised),
            _measure(row.agreement),
            _measure(row.kl),
            _measure(row.faithfulness),
            f"<td>{row.rows.value:,.0f}<small>±{slices.margin(row.rows):,.0f}</small></td>",
            _NONE if row.selection is None else _measure(row.selection, 2),
            f"<td>{row.samples:,}</td>",
        ]
    )


def _measure(estimate: Estimate, places: int = 3) -> str:
    return f"<td>{estimate.value:.{places}f}<small>{_half(estimate, places)}</small></td>"


def _half(estimate: Estimate, places: int) -> str:
    return "±" + f"{slices.margin(estimate):.{places}f}".removeprefix("0")


def _track(row: Row) -> str:
    score, full = row.score, row.full_score
    at = f"--low:{score.low:.4f};--high:{score.high:.4f};--score:{score.value:.4f};--full:{full.value:.4f}"
    return f'<td class="where"><span class="track" style="{at}"><u></u><i></i><b></b></span></td>'


def _crossing(cell: Cell | None) -> str:
    if cell is None:
        return _NONE
    more = [] if cell.normalised is None else [f"n {cell.normalised.value:.2f}{_half(cell.normalised, 2)}"]
    if cell.gain is not None:
        more.append(f"{cell.gain.value:+.3f}{_half(cell.gain, 3)}")
    said = f"{cell.score.value:.3f}<small>{_half(cell.score, 3)}</small>"
    below = "".join(f"<br><small>{part}</small>" for part in more)
    return f'<td class="heat" style="--score:{cell.score.value:.3f}">{said}{below}</td>'


def _heat(row: Row | None) -> str:
    if row is None:
        return _NONE
    shade = f"--score:{row.score.value:.3f}"
    return f'<td class="heat" style="{shade}">{row.score.value:.2f}<small>{_half(row.score, 2)}</small></td>'
