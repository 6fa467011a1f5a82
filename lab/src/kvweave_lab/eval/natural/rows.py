"""Rows: outcomes of one context length under one recipe with one budget, and paired comparisons between them.

The gap between reuse and full attention is that of `reuse` on isolated chunks stored exactly, the same for every row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.recipes.methods import METHODS
from kvweave.types import Storage
from kvweave_lab.eval.natural.offline_cost import OfflineCost
from kvweave_lab.eval.natural.outcomes import (
    FULL_LABEL,
    NO_CONTEXT_LABEL,
    REUSE_LABEL,
    NaturalOutcome,
    is_recipe,
)
from kvweave_lab.eval.outcomes import FULL, Label
from kvweave_lab.recipes.names import exact_name, name_parts
from kvweave_lab.statistics import Estimate, interval_over_tasks, quotient_over_tasks, share_of

SAME_BYTES: Final = 1.05
"""Two recipes store equally many bytes if one stores at most this factor times the other's."""


@dataclass(frozen=True, slots=True)
class Row:
    """All prompts of one context length under one recipe with one budget; intervals by bootstrap over prompts, of shares Wilson's.

    Attributes:
        context_tokens: the length that was asked for.
        recipe: its name; `no context` is full attention without chunks, `full, int8 weights` that with weights in 8 bits.
        method: the recipe without its preparation.
        preparation: how chunks were prepared; None for a recipe that prepares nothing or in a way without a name.
        storage: how prepared KV is stored.
        ratio: the budget; None if it is a coverage.
        coverage: the budget; None if it is a ratio.
        bytes_per_token: stored bytes per token of a chunk; None for recipes that prepare nothing.
        offline_passes: tokens that ran through the model offline per token of a chunk; None as before.
        prompts: their number.
        rows: context tokens computed per prompt.
        nll: negative log-likelihood per token of the reference answer.
        kl: KL(full attention ‖ recipe) per token of the reference answer.
        first_kl: the same of the first token.
        same_first: share of the prompts with full attention's first token.
        f1: of generated answers; None if there are none.
        contains: share of generated answers that contain a reference, which are right; None if there are none.
        kept_right: of the prompts that full attention answers right, the share that the recipe does too; None without any.
        same_answer: share of generated answers that are full attention's, token for token; None if there are none.
        answer_kl: KL(full attention ‖ recipe) per token of full attention's own answer; None without answers.
        agreed: share of that answer's tokens that the recipe chooses too, each after those before it; None without answers.
        time: time to the first token, over all prompts together, divided by full attention's.
        nll_recovery: (reuse − recipe) / (reuse − full) of NLL; None if reuse is not worse than full attention.
        kl_recovery: (reuse − recipe) / reuse of KL, since full attention's is 0.
        nll_pgr: (no context − recipe) / (no context − full) of NLL (KVShareArena's performance gap recovered).
        f1_pgr: (recipe − no context) / (full − no context) of F1; None without answers.
    """

    context_tokens: int
    recipe: str
    method: str
    preparation: str | None
    storage: Storage
    ratio: float | None
    coverage: float | None
    bytes_per_token: float | None
    offline_passes: float | None
    prompts: int
    rows: Estimate
    nll: Estimate
    kl: Estimate
    first_kl: Estimate
    same_first: Estimate
    f1: Estimate | None
    contains: Estimate | None
    kept_right: Estimate | None
    same_answer: Estimate | None
    answer_kl: Estimate | None
    agreed: Estimate | None
    time: Estimate | None
    nll_recovery: Estimate | None
    kl_recovery: Estimate | None
    nll_pgr: Estimate | None
    f1_pgr: Estimate | None

    @property
    def label(self) -> Label:
        """What ran."""
        return self.recipe, self.ratio, self.coverage


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a method differs from the one that it is compared with, prompt by prompt at the same budget.

    Attributes:
        by: what both have in common: "own" (each on its own preparation), "preparation" or "bytes".
        group: the storage, the preparation with its storage, or bytes per token.
        context_tokens: the length.
        ratio: the budget.
        recipe: what is compared.
        against: with what.
        nll: recipe − against; below 0, the recipe is better.
        kl: the same of KL per answer token.
        f1: the same of F1; above 0, the recipe is better. None without answers.
    """

    by: str
    group: str
    context_tokens: int
    ratio: float | None
    coverage: float | None
    recipe: str
    against: str
    nll: Estimate
    kl: Estimate
    f1: Estimate | None


_Value = Callable[[NaturalOutcome], float | None]
_Cells = Mapping[int, Mapping[Label, Sequence[NaturalOutcome]]]


def summary_rows(outcomes: Sequence[NaturalOutcome], costs: Mapping[str, OfflineCost]) -> list[Row]:
    """Return a row per length, recipe and budget; `costs` by recipe name.

    Every prompt must have outcomes under the same recipes, full attention, reuse at 0 and no context among them.
    """
    return [
        _row(length, label, own, cells, costs)
        for length, cells in _cells(outcomes).items()
        for label, own in cells.items()
    ]


def comparisons(outcomes: Sequence[NaturalOutcome], rows: Sequence[Row], against: str) -> list[Comparison]:
    """Return each selecting row's difference from a method at the same budget: own, equal preparation, equal bytes."""
    cells = _cells(outcomes)
    found = []
    for row in rows:
        if row.method == against or row.recipe == FULL or not _selects(row):
            continue
        for other in rows:
            same = (row.context_tokens, row.ratio, row.coverage)
            if other.method != against or (other.context_tokens, other.ratio, other.coverage) != same:
                continue
            for by, group in _common(row, other):
                own = cells[row.context_tokens]
                found.append(_compared(by, group, row, other, own))
    return sorted(found, key=lambda each: (each.context_tokens, each.by, each.group))


def gap(rows: Sequence[Row], context_tokens: int) -> tuple[Row, Row, Row]:
    """Return the rows of full attention, reuse and no context at one length."""
    by_label = {row.label: row for row in rows if row.context_tokens == context_tokens}
    return by_label[FULL_LABEL], by_label[REUSE_LABEL], by_label[NO_CONTEXT_LABEL]


def _common(row: Row, other: Row) -> list[tuple[str, str]]:
    """Return the properties that two rows have in common, each with the name of the group."""
    found: list[tuple[str, str]] = []
    if row.storage == other.storage and _is_own(row) and _is_own(other):
        found.append(("own", row.storage))
    if (row.preparation, row.storage) == (other.preparation, other.storage) and row.preparation is not None:
        found.append(("preparation", f"{row.preparation}, {row.storage}"))
    mine, theirs = row.bytes_per_token, other.bytes_per_token
    if mine is not None and theirs is not None and max(mine, theirs) <= SAME_BYTES * min(mine, theirs):
        found.append(("bytes", f"{theirs:,.0f}"))
    return found


def _compared(
    by: str, group: str, row: Row, other: Row, cells: Mapping[Label, Sequence[NaturalOutcome]]
) -> Comparison:
    mine, theirs = cells[row.label], cells[other.label]

    def difference(value: Callable[[NaturalOutcome], float]) -> Estimate:
        return interval_over_tasks([[value(a) - value(b) for a, b in zip(mine, theirs, strict=True)]])

    pairs = [(a.f1, b.f1) for a, b in zip(mine, theirs, strict=True)]
    return Comparison(
        by=by,
        group=group,
        context_tokens=row.context_tokens,
        ratio=row.ratio,
        coverage=row.coverage,
        recipe=row.recipe,
        against=other.recipe,
        nll=difference(lambda outcome: outcome.nll),
        kl=difference(lambda outcome: outcome.kl),
        f1=_known(None if a is None or b is None else a - b for a, b in pairs),
    )


def _is_own(row: Row) -> bool:
    """Return whether a recipe runs on its own preparation."""
    return exact_name(row.recipe)[0] == row.method


def _selects(row: Row) -> bool:
    return row.method in METHODS and METHODS[row.method]().select.selective


def _cells(outcomes: Sequence[NaturalOutcome]) -> _Cells:
    """Return outcomes by length and label, each label's in the order of prompts."""
    cells: dict[int, dict[Label, list[NaturalOutcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        cells[outcome.context_tokens][outcome.label].append(outcome)
    for own in cells.values():
        prompts = [outcome.prompt for outcome in own[FULL_LABEL]]
        assert all([outcome.prompt for outcome in each] == prompts for each in own.values()), (
            "a gap in the grid"
        )
    return dict(sorted(cells.items()))


def _row(
    length: int,
    label: Label,
    own: Sequence[NaturalOutcome],
    cells: Mapping[Label, Sequence[NaturalOutcome]],
    costs: Mapping[str, OfflineCost],
) -> Row:
    recipe, ratio, coverage = label
    exact, storage = exact_name(recipe) if is_recipe(recipe) else (recipe, "exact")
    method, preparation = name_parts(exact)
    full, reuse, alone = cells[FULL_LABEL], cells[REUSE_LABEL], cells[NO_CONTEXT_LABEL]
    cost = costs.get(recipe)
    return Row(
        context_tokens=length,
        recipe=recipe,
        method=method,
        preparation=preparation,
        storage=storage,
        ratio=ratio,
        coverage=coverage,
        bytes_per_token=cost.bytes_per_token if cost else None,
        offline_passes=cost.passes if cost else None,
        prompts=len(own),
        rows=_mean(own, lambda outcome: outcome.rows),
        nll=_mean(own, _nll),
        kl=_mean(own, _kl),
        first_kl=_mean(own, lambda outcome: outcome.first_kl),
        same_first=_rate([outcome.same_first for outcome in own]),
        f1=_known(map(_f1, own)),
        contains=share_of([outcome.contains for outcome in own]),
        kept_right=share_of([mine.contains for mine, best in zip(own, full, strict=True) if best.contains]),
        same_answer=share_of([outcome.same_answer for outcome in own]),
        answer_kl=_known(outcome.answer_kl for outcome in own),
        agreed=_known(outcome.agreed for outcome in own),
        time=quotient_over_tasks(
            [[outcome.ttft_s for outcome in own]], [[outcome.full_ttft_s for outcome in own]]
        ),
        nll_recovery=_share(_nll, reuse, own, full) if label != NO_CONTEXT_LABEL else None,
        kl_recovery=_share(_kl, reuse, own, full) if label != NO_CONTEXT_LABEL else None,
        nll_pgr=_share(_nll, alone, own, full),
        f1_pgr=_share(_f1, alone, own, full),
    )


def _rate(outcomes: Sequence[bool]) -> Estimate:
    found = share_of(outcomes)
    assert found is not None
    return found


def _nll(outcome: NaturalOutcome) -> float:
    return outcome.nll


def _kl(outcome: NaturalOutcome) -> float:
    return outcome.kl


def _f1(outcome: NaturalOutcome) -> float | None:
    return outcome.f1


def _mean(own: Sequence[NaturalOutcome], value: Callable[[NaturalOutcome], float]) -> Estimate:
    return interval_over_tasks([[float(value(outcome)) for outcome in own]])


def _known(values: Iterable[float | None]) -> Estimate | None:
    """Return the mean of the values that there are; None if there are none."""
    known = [float(each) for each in values if each is not None]
    return interval_over_tasks([known]) if known else None


def _share(
    value: _Value,
    worst: Sequence[NaturalOutcome],
    own: Sequence[NaturalOutcome],
    best: Sequence[NaturalOutcome],
) -> Estimate | None:
    """Return which share of the way from the worst to the best a recipe goes: ratio of means, resampled in pairs.

    The same whether higher or lower values are better. None without values, or if there is no way to go.
    """
    ends = [tuple(map(value, each)) for each in zip(worst, own, best, strict=True)]
    known = [(a, b, c) for a, b, c in ends if a is not None and b is not None and c is not None]
    if not known:
        return None
    sign = 1 if value is _f1 else -1
    gained = [sign * (b - a) for a, b, _ in known]
    way = [sign * (c - a) for a, _, c in known]
    return quotient_over_tasks([gained], [way])
