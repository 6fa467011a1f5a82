"""Runs of the same prompts compared prompt by prompt: two recipes, preparations by selectors, and storages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.recipes.methods import METHODS, PREPARATIONS
from kvweave.types import Storage
from kvweave_lab.eval.outcomes import Label, Outcome
from kvweave_lab.eval.rows import OVERALL, Row
from kvweave_lab.recipes.names import exact_name, name_parts
from kvweave_lab.statistics import Estimate, interval_over_tasks


def difference(outcomes: Iterable[Outcome], mine: Label, theirs: Label) -> Estimate | None:
    """Return how much higher `mine` scores than `theirs`: the mean over tasks, of the prompts that both ran on.

    Differences are resampled, so that a prompt's two scores stay together. None if no prompt has both.
    """
    return mean_difference(outcomes, [(mine, theirs)])


def mean_difference(outcomes: Iterable[Outcome], pairs: Sequence[tuple[Label, Label]]) -> Estimate | None:
    """Return the mean of several pairs' differences, prompt by prompt, of the prompts that all of them ran on."""
    scores: dict[tuple[str, str], dict[Label, float]] = {}
    for outcome in outcomes:
        scores.setdefault((outcome.task, outcome.sample), {})[outcome.label] = outcome.score
    wanted = {label for pair in pairs for label in pair}
    tasks: dict[str, list[float]] = {}
    for (task, _), found in scores.items():
        if wanted <= found.keys():
            gains = [found[mine] - found[theirs] for mine, theirs in pairs]
            tasks.setdefault(task, []).append(sum(gains) / len(gains))
    return interval_over_tasks(list(tasks.values())) if tasks else None


COMPARED = "isolated"
"""The preparation with which a matrix compares the others."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One selector on one preparation, over all tasks.

    Attributes:
        selector: the method whose selection ran.
        preparation: how the chunks were prepared.
        recipe: the name of both together in rows.
        samples: prompts.
        score: mean over tasks.
        normalised: share of full attention's gain over reuse; None if that gain is too small.
        gain: score minus the same selector's on isolated chunks, prompt by prompt; None for isolated chunks
            themselves, and if those did not run.
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
    """Every selector on every preparation at one length and ratio; a selector that selects nothing is at ratio 0.

    FusionRAG §5.3.1 claims that preparing chunks with similar ones before them lifts every selector. The paired gains
    of the cells test that.
    """

    context_tokens: int
    ratio: float
    selectors: tuple[str, ...]
    preparations: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, selector: str, preparation: str) -> Cell | None:
        """Return the cell, or None if it did not run."""
        return next((c for c in self.cells if (c.selector, c.preparation) == (selector, preparation)), None)


class Verdict(NamedTuple):
    """The number of selectors whose score a preparation certainly lifts, and certainly lowers (95 %)."""

    lifted: int
    lowered: int
    of: int


def verdict(matrix: Matrix, preparation: str) -> Verdict | None:
    """Return the gains of a preparation over isolated chunks for the selectors, or None if it was not compared."""
    gains = [cell.gain for cell in matrix.cells if cell.preparation == preparation and cell.gain is not None]
    if not gains:
        return None
    return Verdict(sum(gain.low > 0 for gain in gains), sum(gain.high < 0 for gain in gains), len(gains))


def matrices(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> list[Matrix]:
    """Return a matrix per length and ratio, of the selectors that ran on at least two preparations.

    `rows` must sum up `outcomes`.
    """
    overall = [row for row in rows if row.task == OVERALL and row.coverage is None]
    found = []
    for context_tokens in sorted({row.context_tokens for row in overall}):
        at_length = [row for row in overall if row.context_tokens == context_tokens]
        scores = _scores(outcome for outcome in outcomes if outcome.context_tokens == context_tokens)
        for ratio in _ratios(at_length):
            chosen = [row for row in at_length if row.ratio == (ratio if _selects(row.recipe) else 0)]
            matrix = _matrix(context_tokens, ratio, chosen, scores)
            # What selects nothing looks the same at every ratio, and makes no matrix of its own.
            if any(_selects(selector) for selector in matrix.selectors) or (matrix.cells and not ratio):
                found.append(matrix)
    return found


_Scores = Mapping[tuple[str, float | None], Mapping[str, Mapping[str, float]]]
"""Scores by recipe and ratio, then by task, then by sample."""


def _scores(outcomes: Iterable[Outcome]) -> _Scores:
    found: dict[tuple[str, float | None], dict[str, dict[str, float]]] = {}
    for outcome in outcomes:
        if outcome.coverage is None:
            tasks = found.setdefault((outcome.recipe, outcome.ratio), {})
            tasks.setdefault(outcome.task, {})[outcome.sample] = outcome.score
    return found


def _ratios(rows: Iterable[Row]) -> list[float]:
    """Return the ratios between 0 and 1, at which selections matter, or 0 if no such ratio was measured."""
    between = {row.ratio for row in rows if row.ratio is not None and 0 < row.ratio < 1}
    return sorted(between) or [0.0]


def _selects(recipe: str) -> bool:
    method, _ = name_parts(recipe)
    return method in METHODS and METHODS[method]().select.selective


def _matrix(context_tokens: int, ratio: float, rows: Sequence[Row], scores: _Scores) -> Matrix:
    by_parts: dict[str, dict[str, Row]] = {}
    for row in rows:
        selector, preparation = name_parts(row.recipe)
        # Quantised preparations are compared by `storage_costs`.
        if preparation is not None and preparation in PREPARATIONS:
            by_parts.setdefault(selector, {})[preparation] = row
    by_parts = {selector: own for selector, own in by_parts.items() if len(own) > 1}
    preparations = [name for name in PREPARATIONS if any(name in own for own in by_parts.values())]
    cells = [
        _cell(selector, preparation, own, scores)
        for selector, own in by_parts.items()
        for preparation in preparations
        if preparation in own
    ]
    return Matrix(context_tokens, ratio, tuple(by_parts), tuple(preparations), tuple(cells))


def _cell(selector: str, preparation: str, own: Mapping[str, Row], scores: _Scores) -> Cell:
    row, compared = own[preparation], own.get(COMPARED)
    gain = None
    if compared is not None and compared is not row:
        gain = _gain(scores[row.recipe, row.ratio], scores[compared.recipe, compared.ratio])
    return Cell(selector, preparation, row.recipe, row.samples, row.score, row.normalised, gain, row.rows)


def _gain(mine: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> Estimate:
    """Return the mean of differences on the same prompts, so that resamples stay paired."""
    return interval_over_tasks(
        [[score - theirs[task][sample] for sample, score in own.items()] for task, own in mine.items()]
    )


@dataclass(frozen=True, slots=True)
class StorageCost:
    """What storing chunk KV in fewer bits costs one recipe with one budget, over all tasks of one length.

    Attributes:
        context_tokens: the length; 0 for samples from files.
        recipe: its name with exact storage.
        ratio: the budget; None if it is a coverage.
        coverage: the budget; None if it is a ratio.
        storage: int8 or int4.
        samples: prompts.
        exact_score: mean over tasks, with exact storage.
        score: with this storage.
        lost: exact_score - score, resampled in pairs.
        same: share of the prompts with word for word the same answer.
    """

    context_tokens: int
    recipe: str
    ratio: float | None
    coverage: float | None
    storage: Storage
    samples: int
    exact_score: Estimate
    score: Estimate
    lost: Estimate
    same: Estimate


_Prompts = dict[str, dict[str, Outcome]]
"""Outcomes by task and sample."""


def storage_costs(outcomes: Iterable[Outcome]) -> list[StorageCost]:
    """Return a cost for each length, recipe, budget and storage that ran quantised and exact on the same prompts."""
    cells: dict[tuple[int, Label], _Prompts] = {}
    for outcome in outcomes:
        cell = cells.setdefault((outcome.context_tokens, outcome.label), {})
        cell.setdefault(outcome.task, {})[outcome.sample] = outcome
    costs = []
    for (context_tokens, (recipe, ratio, coverage)), quantised in cells.items():
        plain, storage = exact_name(recipe)
        exact = cells.get((context_tokens, (plain, ratio, coverage)))
        if storage != "exact" and exact is not None:
            costs.append(_storage_cost(context_tokens, (plain, ratio, coverage), storage, quantised, exact))
    return sorted(costs, key=lambda cost: cost.context_tokens)


def _storage_cost(
    context_tokens: int, label: Label, storage: Storage, quantised: _Prompts, exact: _Prompts
) -> StorageCost:
    pairs = [[(exact[task][name], one) for name, one in own.items()] for task, own in quantised.items()]
    recipe, ratio, coverage = label
    return StorageCost(
        context_tokens=context_tokens,
        recipe=recipe,
        ratio=ratio,
        coverage=coverage,
        storage=storage,
        samples=sum(map(len, pairs)),
        exact_score=interval_over_tasks([[before.score for before, _ in task] for task in pairs]),
        score=interval_over_tasks([[after.score for _, after in task] for task in pairs]),
        lost=interval_over_tasks([[before.score - after.score for before, after in task] for task in pairs]),
        same=interval_over_tasks(
            [[before.answer == after.answer for before, after in task] for task in pairs]
        ),
    )
