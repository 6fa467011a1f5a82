"""What an analysis of selections produces: plain values for JSON, tables and plots."""

from dataclasses import dataclass

from kvweave_lab.eval.results import Estimate

Line = tuple[Estimate, ...]
Grid = tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class TaskLayers:
    """One task's LAYER_CURVES, per layer: what the question's most attended tokens of that layer find."""

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
        agreement: tasks × tasks, rank correlation between tasks of how well each layer over stale KV foresees
            decoding; on the diagonal between the task's own odd and even prompts, which is as much as their
            number allows.
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
    """How well an auxiliary model foresees the reference's last layer; `Alignment` defines the quantities.

    `left_out` prompts did not fit the auxiliary model or could not be laid side by side token by token. The last two
    are differences prompt by prompt, the auxiliary model's minus the reference's own first layer's: below 0 its KL,
    and above 0 its Jaccard index, is the better one.
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
    """What `analyse` returns. Means over tasks of each task's mean; 95 % intervals by bootstrap over prompts.

    Attributes:
        model: name of the reference model.
        ratio: share of the context that selections take.
        samples: number of prompts.
        left_out: prompts beside them that the model has no room for.
        tasks: their tasks, in order of appearance.
        context_tokens: mean length of a context.
        chunk_tokens: mean length of a chunk, its separator included.
        selections: names, in the order of every row; SELECTIONS describes them.
        factors: names; FACTORS describes them.
        ratios: of the curves.
        layer_curves: names; LAYER_CURVES describes them.
        preparations: one report for each kind of stale KV, in the order given.
        answers: over the first preparation; None where none were asked for.
        auxiliary: None where no auxiliary model was given or none of its prompts could be compared.
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
