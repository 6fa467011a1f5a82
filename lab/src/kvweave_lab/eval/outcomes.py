"""Outcomes of an evaluation: one per prompt, recipe and budget, and the log that holds them on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvweave_lab.results_log import ResultsLog, read_results

FULL, REUSE = "full", "reuse"
"""The recipes that every other one is compared with: full attention, and reuse at ratio 0."""

Label = tuple[str, float | None, float | None]
"""What runs on a prompt: a recipe's name, and either a ratio or a coverage; the other one is None."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The tokens of one run by origin; `lab/experiments/replay.py` times the same numbers on a real shape.

    `exact`, `stale` and `fresh` are the prompt's tokens by origin. `recomputed` counts the exact and stale ones that
    were computed anyway, `decoded` the answer's tokens.
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
        context_tokens: the length for which the sample was generated; 0 for samples read from a file.
        seed: of the sample.
        sample: the sample's name.
        recipe: the recipe's name.
        ratio: requested share of stale context tokens to recompute, 0..1; None if a coverage was requested.
        answer: the generated text.
        score: by the sample's metric, 0..1.
        agreement: whether the answer equals full attention's.
        kl: Kullback-Leibler divergence of the first token's distribution from full attention's, in nats.
        faithfulness: share of the answer's facts that the context contains, 0..1.
        rows: computed context tokens: the recomputed ones and those for which nothing was stored.
        selection: share of the recomputed stale rows that are among the equally many stale rows to which the
            question attends most under full attention; None if no stale row was recomputed.
        trace: the tokens by origin.
        took_s: time to compute the outcome, in seconds; not compared.
        coverage: requested share of all scores that the recomputed tokens hold, 0..1; None if a ratio was requested.
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


OutcomeKey = tuple[str, Label]
"""A prompt under a recipe with a budget: the sample's name, and what ran."""

OUTCOMES_VERSION = 6
"""The meaning of an outcome; raise it after a change of a field, task or recipe that makes older outcomes misleading."""

_FILE = "outcomes.jsonl"


class OutcomeLog(ResultsLog[OutcomeKey, Outcome]):
    """The outcomes of prompts under recipes; raises as ResultsLog does."""

    def __init__(self, folder: Path | None, run_config: Mapping[str, Any]) -> None:
        super().__init__(
            folder,
            run_config,
            file=_FILE,
            version=OUTCOMES_VERSION,
            key=lambda outcome: (outcome.sample, outcome.label),
            parse=_parse,
        )


def read_outcomes(folder: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Return a folder's run configuration, versions included, and its complete outcomes. Changes nothing there.

    Raises:
        InvalidRequest: the folder holds no outcomes of this version, or they are damaged.
    """
    return read_results(folder / _FILE, OUTCOMES_VERSION, _parse)


def _parse(content: dict[str, Any]) -> Outcome:
    return Outcome(**content | {"trace": Trace(**content["trace"])})
