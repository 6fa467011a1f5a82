"""What an evaluation produces: one outcome per prompt, recipe and budget, and rows that sum them up."""

from dataclasses import dataclass, field

FULL, REUSE = "full", "reuse"
"""The recipes that every other one is compared with: full attention, and reuse at ratio 0."""

Label = tuple[str, float | None, float | None]
"""What runs on a prompt: a recipe's name, and the ratio or the coverage asked for, the other one being None."""

QUOTABLE = 200
"""Prompts behind a figure below which it should not be quoted."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Where the tokens of one run came from; `lab/experiments/replay.py` times the same on a real shape.

    `exact`, `stale` and `fresh` are the prompt's tokens by origin, `recomputed` how many of the exact and
    stale ones were computed anyway, `decoded` the answer's.
    """

    exact: int
    stale: int
    recomputed: int
    fresh: int
    decoded: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt under one recipe with one budget.

    Attributes:
        task: the task.
        context_tokens: the length the sample was made for; 0 for samples read from a file.
        seed: of the sample.
        sample: the sample's name.
        recipe: the recipe's name.
        ratio: asked share of stale context tokens to recompute, 0..1; None where a coverage was asked for.
        answer: the text that was generated.
        score: by the sample's metric, 0..1.
        agreement: whether the answer equals full attention's.
        kl: Kullback-Leibler divergence of the first token's distribution from full attention's, in nats.
        faithfulness: share of the answer's facts that stand in the context, 0..1.
        rows: context tokens that were computed: recomputed ones and those for which nothing was stored.
        selection: share of the recomputed stale rows that are among the equally many stale rows to which the
            question attends most under full attention; None when no stale row was recomputed.
        trace: the tokens.
        took_s: what it took to come by the outcome, in seconds; no part of the result.
        coverage: asked share of all scores that the recomputed tokens hold, 0..1; None where a ratio was asked for.
    """

    task: str
    context_tokens: int
    seed: int
    sample: str
    recipe: str
    ratio: float | None
    answer: str
    score: float
    agreement: bool
    kl: float
    faithfulness: float
    rows: int
    selection: float | None
    trace: Trace
    took_s: float = field(compare=False)
    coverage: float | None = None

    @property
    def label(self) -> Label:
        """What ran on the prompt."""
        return self.recipe, self.ratio, self.coverage


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """All prompts of one task and length under one recipe with one budget; intervals by bootstrap over prompts.

    What compares two runs of a prompt is resampled in pairs: `lost` = full_score - score, and `normalised` =
    (score - reuse_score) / (full_score - reuse_score) (FusionRAG eq. 11), None where full attention gains less
    than 0.1 over reuse. `rows` is the number of context tokens computed for a prompt; neither the system prefix
    nor the question counts. `task` "overall" is the mean over tasks, its `normalised` the ratio of means over
    tasks with a gain of at least 0.1. Either `ratio` or `coverage` is None, as in an Outcome.
    """

    task: str
    context_tokens: int
    recipe: str
    ratio: float | None
    samples: int
    score: Estimate
    full_score: Estimate
    reuse_score: Estimate
    lost: Estimate
    normalised: Estimate | None
    agreement: Estimate
    kl: Estimate
    faithfulness: Estimate
    rows: Estimate
    selection: Estimate | None
    coverage: float | None = None

    @property
    def series(self) -> str:
        """What tables and figures call the recipe: one with a coverage is told from the same with a ratio."""
        return self.recipe if self.coverage is None else f"{self.recipe} by coverage"

    @property
    def budget(self) -> float:
        """The ratio or the coverage that was asked for."""
        budget = self.ratio if self.coverage is None else self.coverage
        assert budget is not None
        return budget
