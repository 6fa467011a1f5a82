"""The report of an analysis of selections, and how the findings of many prompts become one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave_lab.eval.selection.layer_attention import Alignment
from kvweave_lab.eval.selection.measure import (
    FACTORS,
    LAYER_CURVES,
    RATIOS,
    SELECTIONS,
    Measured,
    rank_correlation,
)
from kvweave_lab.statistics import Array, Estimate, interval_of_means, interval_over_tasks

ANSWERED = (
    "optimal",
    "question_stale",
    "question_stale_last",
    "deviation",
    "kvshare",
    "position",
    "random",
)
"""The selections with which prompts are answered."""

Line = tuple[Estimate, ...]

Grid = tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class TaskLayers:
    """One task's LAYER_CURVES per layer."""

    task: str
    samples: int
    curves: Grid


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """How far stale KV is from full attention's; `Measured` defines each quantity.

    Attributes:
        keys: per layer (FusionRAG eq. 7, mean over tokens).
        values: per layer.
        relative: per layer, of keys and values together, as a share of their squared length.
        left: per layer, share outside the worst tokens.
        depths: of the second layer, share by tenth of the chunk.
        chunks: of the second layer, share by chunk.
    """

    keys: Line
    values: Line
    relative: Line
    left: Line
    depths: Line
    chunks: Line


@dataclass(frozen=True, slots=True)
class PreparationReport:
    """Everything measured over one kind of stale KV.

    Rows follow `SelectionReport.selections` or `factors`, columns `ratios` where there is one per ratio.

    Attributes:
        name: of the preparation.
        overlap: selections × selections, share of tokens in common.
        jaccard: selections × selections.
        by_ratio: selections × ratios, share of the decode-attended tokens selected.
        with_optimal: selections × layers from the second on, share of that layer's optimal tokens selected.
        of_optimal: selections, the same as a mean over those layers.
        factor_loss: factors × ratios, share of the loss left.
        selection_loss: selections × ratios, share of the loss left.
        layers: over all tasks first, named "overall", then task by task.
        agreement: tasks × tasks, rank correlation between tasks of how well each layer over stale KV predicts
            decoding; on the diagonal between the task's own odd and even prompts, the most that their number allows.
        depths: selections × tenths of a chunk, share of the selected tokens.
        chunks: selections × chunks, share of the selected tokens.
        deviation: of the KV itself.
    """

    name: str
    overlap: Grid
    jaccard: Grid
    by_ratio: Grid
    with_optimal: Grid
    of_optimal: Line
    factor_loss: Grid
    selection_loss: Grid
    layers: tuple[TaskLayers, ...]
    agreement: Grid
    depths: Grid
    chunks: Grid
    deviation: KVDeviation


@dataclass(frozen=True, slots=True)
class AnswersReport:
    """Answers after the tokens of idealised selections were recomputed (ProphetKV fig. 9).

    Attributes:
        selections: names, in the order of the rows.
        ratios: shares of the stale tokens, in the order of the columns.
        score: selections × ratios.
        kl: selections × ratios, of the first token's distribution from full attention's, in nats.
        full_score: under full attention.
        stale_score: with nothing recomputed.
        stale_kl: with nothing recomputed.
    """

    selections: tuple[str, ...]
    ratios: tuple[float, ...]
    score: Grid
    kl: Grid
    full_score: Estimate
    stale_score: Estimate
    stale_kl: Estimate


@dataclass(frozen=True, slots=True)
class AuxiliaryReport:
    """How well an auxiliary model predicts the reference's last layer; `Alignment` defines the quantities.

    `left_out` prompts did not fit the auxiliary model or could not be aligned token by token. The last two are
    differences prompt by prompt, the auxiliary model's minus the reference's own first layer's. The auxiliary model is
    better if its KL difference is below 0 and its Jaccard difference above 0.
    """

    name: str
    samples: int
    left_out: int
    kl: Estimate
    own_kl: Estimate
    jaccard: Estimate
    own_jaccard: Estimate
    kl_difference: Estimate
    jaccard_difference: Estimate


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """Means over tasks of each task's mean, with 95 % intervals by bootstrap over prompts.

    Attributes:
        model: name of the reference model.
        ratio: share of the context that selections take.
        samples: number of prompts.
        left_out: further prompts that are too long for the model.
        tasks: their tasks, in order of appearance.
        context_tokens: mean length of a context.
        chunk_tokens: mean length of a chunk, its separator included.
        selections: names, in the order of every row; SELECTIONS describes them.
        factors: names; FACTORS describes them.
        ratios: of the curves.
        layer_curves: names; LAYER_CURVES describes them.
        preparations: one report for each kind of stale KV, in the order given.
        answers: over the first preparation; None if not requested.
        auxiliary: None without an auxiliary model, or if none of its prompts could be compared.
    """

    model: str
    ratio: float
    samples: int
    left_out: int
    tasks: tuple[str, ...]
    context_tokens: float
    chunk_tokens: float
    selections: tuple[str, ...]
    factors: tuple[str, ...]
    ratios: tuple[float, ...]
    layer_curves: tuple[str, ...]
    preparations: tuple[PreparationReport, ...]
    answers: AnswersReport | None
    auxiliary: AuxiliaryReport | None


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answers; A selections as ANSWERED, P ratios.

    Attributes:
        score: (A, P) by the sample's metric, 0..1.
        kl: (A, P) divergence of the first token's distribution from full attention's, in nats.
        full_score: under full attention.
        stale_score: with nothing recomputed.
        stale_kl: with nothing recomputed.
    """

    score: Tensor
    kl: Tensor
    full_score: float
    stale_score: float
    stale_kl: float


@dataclass(frozen=True, slots=True)
class PromptFindings:
    """The findings of one prompt; `measured` by preparation, the others None if not requested."""

    task: str
    context_tokens: int
    chunks: int
    measured: Mapping[str, Measured]
    answered: Answered | None
    alignment: Alignment | None


def summarise(
    model: str,
    ratio: float,
    answered_ratios: tuple[float, ...],
    auxiliary: str | None,
    found: Sequence[PromptFindings],
    left_out: int,
) -> SelectionReport:
    """Sum up at least one prompt; `model` and `auxiliary` are names, `left_out` is a number of prompts."""
    tokens = sum(one.context_tokens for one in found)
    tasks = [one.task for one in found]
    return SelectionReport(
        model=model,
        ratio=ratio,
        samples=len(found),
        left_out=left_out,
        tasks=tuple(dict.fromkeys(tasks)),
        context_tokens=tokens / len(found),
        chunk_tokens=tokens / sum(one.chunks for one in found),
        selections=tuple(SELECTIONS),
        factors=tuple(FACTORS),
        ratios=RATIOS,
        layer_curves=tuple(LAYER_CURVES),
        preparations=tuple(
            _preparation(name, [one.measured[name] for one in found], tasks) for name in found[0].measured
        ),
        answers=_answers([one.answered for one in found if one.answered is not None], tasks, answered_ratios),
        auxiliary=None if auxiliary is None else _alignment(auxiliary, found),
    )


def _preparation(name: str, measured: Sequence[Measured], tasks: Sequence[str]) -> PreparationReport:
    def values(field: Callable[[Measured], Tensor]) -> Grid:
        return _grid(torch.stack([field(one) for one in measured]), tasks)

    keys, of_values = values(lambda one: one.deviation)
    return PreparationReport(
        name=name,
        overlap=values(lambda one: one.overlap),
        jaccard=values(lambda one: one.jaccard),
        by_ratio=values(lambda one: one.by_ratio),
        with_optimal=values(lambda one: one.with_optimal),
        of_optimal=tuple(mean for (mean,) in values(lambda one: one.with_optimal.mean(-1, keepdim=True))),
        factor_loss=values(lambda one: one.loss),
        selection_loss=values(lambda one: one.selection_loss),
        layers=_task_layers(measured, tasks),
        agreement=_agreement(measured, tasks),
        depths=values(lambda one: one.depths),
        chunks=_grid(_padded([one.chunks for one in measured]), tasks),
        deviation=KVDeviation(
            keys=keys,
            values=of_values,
            relative=values(lambda one: one.relative[None])[0],
            left=values(lambda one: one.deviation_left[None])[0],
            depths=values(lambda one: one.deviation_depths[None])[0],
            chunks=_grid(_padded([one.deviation_chunks[None] for one in measured]), tasks)[0],
        ),
    )


def _answers(
    answered: Sequence[Answered], tasks: Sequence[str], ratios: tuple[float, ...]
) -> AnswersReport | None:
    if not answered:
        return None
    return AnswersReport(
        selections=ANSWERED,
        ratios=ratios,
        score=_grid(torch.stack([one.score for one in answered]), tasks),
        kl=_grid(torch.stack([one.kl for one in answered]), tasks),
        full_score=_mean([one.full_score for one in answered], tasks),
        stale_score=_mean([one.stale_score for one in answered], tasks),
        stale_kl=_mean([one.stale_kl for one in answered], tasks),
    )


def _alignment(name: str, found: Sequence[PromptFindings]) -> AuxiliaryReport | None:
    pairs = [(one.alignment, one.task) for one in found if one.alignment is not None]
    if not pairs:
        return None
    aligned, tasks = zip(*pairs, strict=True)
    return AuxiliaryReport(
        name=name,
        samples=len(pairs),
        left_out=len(found) - len(pairs),
        kl=_mean([one.kl for one in aligned], tasks),
        own_kl=_mean([one.own_kl for one in aligned], tasks),
        jaccard=_mean([one.jaccard for one in aligned], tasks),
        own_jaccard=_mean([one.own_jaccard for one in aligned], tasks),
        kl_difference=_mean([one.kl - one.own_kl for one in aligned], tasks),
        jaccard_difference=_mean([one.jaccard - one.own_jaccard for one in aligned], tasks),
    )


def _mean(values: Sequence[float], tasks: Sequence[str]) -> Estimate:
    return _grid(torch.tensor(values, dtype=torch.float64)[:, None, None], tasks)[0][0]


def _grid(values: Tensor, tasks: Sequence[str]) -> Grid:
    """Return mean and interval of every cell of values (prompts, rows, columns)."""
    by_task = [values[own].numpy() for own in _by_task(tasks).values()]
    rows, columns = values.shape[1:]
    return tuple(
        tuple(interval_over_tasks([part[:, i, j] for part in by_task]) for j in range(columns))
        for i in range(rows)
    )


def _by_task(tasks: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of each task's prompts."""
    found: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        found.setdefault(task, []).append(number)
    return found


def _task_layers(measured: Sequence[Measured], tasks: Sequence[str]) -> tuple[TaskLayers, ...]:
    curves = torch.stack([one.layers for one in measured])  # (prompts, 3, L)
    overall = TaskLayers("overall", len(tasks), _grid(curves, tasks))
    by_task = _by_task(tasks).items()
    return overall, *(
        TaskLayers(task, len(own), _grid(curves[own], [task] * len(own))) for task, own in by_task
    )


def _agreement(measured: Sequence[Measured], tasks: Sequence[str]) -> Grid:
    curve = list(LAYER_CURVES).index("stale")
    curves = torch.stack([one.layers[curve] for one in measured])  # (prompts, L)
    by_task = [curves[own] for own in _by_task(tasks).values()]

    def between(a: int, b: int) -> Estimate:
        pair = (by_task[a], by_task[b]) if a != b else (by_task[a][::2], by_task[a][1::2])
        if min(len(prompts) for prompts in pair) == 0:
            return Estimate(1.0, 1.0, 1.0)  # a single prompt agrees with itself
        return interval_of_means(_rank_correlations, [prompts.numpy() for prompts in pair])

    count = range(len(by_task))
    found = {(a, b): between(a, b) for a in count for b in count if a <= b}
    return tuple(tuple(found[min(a, b), max(a, b)] for b in count) for a in count)


def _rank_correlations(left: Array, right: Array) -> Array:
    found: Array = rank_correlation(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    return found


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Return prompts' shares (rows, C) as (prompts, rows, C); prompts with fewer chunks have 0 in the last ones."""
    most = max(part.shape[-1] for part in parts)
    return torch.stack([torch.nn.functional.pad(part, (0, most - part.shape[-1])) for part in parts])
