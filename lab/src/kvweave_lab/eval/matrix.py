"""Preparation × selector: what each way of preparing chunks is worth to each way of selecting tokens.

FusionRAG §5.3.1 claims that preparing chunks behind similar ones lifts every selector; the paired differences here say
whether it does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.recipes.methods import METHODS, PREPARATIONS, named_parts
from kvweave_lab.eval.results import Estimate, Outcome, Row
from kvweave_lab.eval.statistics import interval_over_tasks
from kvweave_lab.eval.summary import OVERALL

COMPARED = "isolated"
"""The preparation that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One selector on one preparation, over all tasks.

    Attributes:
        selector: the method whose selection ran.
        preparation: how the chunks were prepared.
        recipe: what rows call the two together.
        samples: prompts.
        score: mean over tasks.
        normalised: share of full attention's gain over reuse, None where that gain is too small.
        gain: score minus the same selector's on isolated chunks, prompt by prompt; None for isolated chunks
            themselves, and where they were not run.
        rows: context tokens computed per prompt.
    """

    selector: str
    preparation: str
    recipe: str
    samples: int
    score: Estimate
    normalised: Estimate | None
    gain: Estimate | None
    rows: Estimate


@dataclass(frozen=True, slots=True)
class Matrix:
    """All cells of one length and ratio; what selects nothing stands in it at ratio 0."""

    context_tokens: int
    ratio: float
    selectors: tuple[str, ...]
    preparations: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, selector: str, preparation: str) -> Cell | None:
        """The cell, if it was run."""
        return next((c for c in self.cells if (c.selector, c.preparation) == (selector, preparation)), None)


class Verdict(NamedTuple):
    """Of how many selectors a preparation certainly lifts the score, and certainly lowers it (95 %)."""

    lifted: int
    lowered: int
    of: int


def verdict(matrix: Matrix, preparation: str) -> Verdict | None:
    """What a preparation does to the selectors, compared with isolated chunks; None if it was not compared."""
    gains = [cell.gain for cell in matrix.cells if cell.preparation == preparation and cell.gain is not None]
    if not gains:
        return None
    return Verdict(sum(gain.low > 0 for gain in gains), sum(gain.high < 0 for gain in gains), len(gains))


def matrices(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> list[Matrix]:
    """A matrix per length and ratio, of the selectors that ran on two preparations or more; `rows` sum up `outcomes`."""
    overall = [row for row in rows if row.task == OVERALL and row.coverage is None]
    found = []
    for context_tokens in sorted({row.context_tokens for row in overall}):
        here = [row for row in overall if row.context_tokens == context_tokens]
        scores = _scores(outcome for outcome in outcomes if outcome.context_tokens == context_tokens)
        for ratio in _ratios(here):
            chosen = [row for row in here if row.ratio == (ratio if _selects(row.recipe) else 0)]
            matrix = _matrix(context_tokens, ratio, chosen, scores)
            # What selects nothing looks the same at every ratio, and makes no matrix of its own.
            if any(_selects(selector) for selector in matrix.selectors) or (matrix.cells and not ratio):
                found.append(matrix)
    return found


_Scores = Mapping[tuple[str, float | None], Mapping[str, Mapping[str, float]]]
"""By recipe and ratio, then by task, then by sample."""


def _scores(outcomes: Iterable[Outcome]) -> _Scores:
    found: dict[tuple[str, float | None], dict[str, dict[str, float]]] = {}
    for outcome in outcomes:
        if outcome.coverage is None:
            tasks = found.setdefault((outcome.recipe, outcome.ratio), {})
            tasks.setdefault(outcome.task, {})[outcome.sample] = outcome.score
    return found


def _ratios(rows: Iterable[Row]) -> list[float]:
    """Those at which preparations differ in more than what they start from; 0 where there is no other."""
    between = {row.ratio for row in rows if row.ratio is not None and 0 < row.ratio < 1}
    return sorted(between) or [0.0]


def _selects(recipe: str) -> bool:
    method, _ = named_parts(recipe)
    return method in METHODS and METHODS[method]().select.selects


def _matrix(context_tokens: int, ratio: float, rows: Sequence[Row], scores: _Scores) -> Matrix:
    by_parts: dict[str, dict[str, Row]] = {}
    for row in rows:
        selector, preparation = named_parts(row.recipe)
        # Those in fewer bits are compared in quantisation.py.
        if preparation is not None and preparation in PREPARATIONS:
            by_parts.setdefault(selector, {})[preparation] = row
    by_parts = {selector: own for selector, own in by_parts.items() if len(own) > 1}
    there = [name for name in PREPARATIONS if any(name in own for own in by_parts.values())]
    cells = [
        _cell(selector, preparation, own, scores)
        for selector, own in by_parts.items()
        for preparation in there
        if preparation in own
    ]
    return Matrix(context_tokens, ratio, tuple(by_parts), tuple(there), tuple(cells))


def _cell(selector: str, preparation: str, own: Mapping[str, Row], scores: _Scores) -> Cell:
    row, compared = own[preparation], own.get(COMPARED)
    gain = None
    if compared is not None and compared is not row:
        gain = _gain(scores[row.recipe, row.ratio], scores[compared.recipe, compared.ratio])
    return Cell(selector, preparation, row.recipe, row.samples, row.score, row.normalised, gain, row.rows)


def _gain(mine: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> Estimate:
    """Resampled as differences of the same prompts, so that they stay paired."""
    return interval_over_tasks(
        [[score - theirs[task][sample] for sample, score in own.items()] for task, own in mine.items()]
    )
