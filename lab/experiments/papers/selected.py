"""Measures which rows recipes recompute: their places in chunks and among chunks, and their share of the evidence.

Prompts are prefilled, not answered. Every piece of a grid has a results log.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.recipe import run as prefill
from kvweave.results import PlanSpan
from kvweave_lab.eval.outcomes import OUTCOMES_VERSION
from kvweave_lab.eval.preparation import OtherDocuments, prepare_sample, render
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.eval.samples import Sample
from kvweave_lab.results_log import ResultsLog, run_config
from kvweave_lab.statistics import Estimate, interval_over_tasks
from recipe_grid import Grid, model, progress_printer, run_pieces

TENTHS, FIFTHS = 10, 5
_SENTENCE = re.compile(r"[^.!?]+[.!?]*")
_WORD = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Selected:
    """The selected rows of one prompt under one recipe.

    Attributes:
        tenths: shares of the selected rows by tenth of their chunk.
        stale_tenths: the same for all stale rows.
        fifths: shares of the selected rows by fifth of the stale chunks, in prompt order.
        stale_fifths: the same for all stale rows.
        evidence: selected share of the stale evidence; None if no evidence is stale.
        beside: share of the selected rows that are no evidence; None if none were selected.
    """

    task: str
    sample: str
    recipe: str
    tenths: list[float]
    stale_tenths: list[float]
    fifths: list[float]
    stale_fifths: list[float]
    evidence: float | None
    beside: float | None


def run(grid: Grid, folder: Path, processes: int) -> list[Selected]:
    """Return the selections of every recipe on every prompt; computes those that the folder lacks.

    The grid has a single ratio.
    """
    return list(chain.from_iterable(run_pieces(_run_piece, grid, folder, processes)))


def _run_piece(piece: Grid, folder: Path) -> list[Selected]:
    adapter = model(piece.model)
    ratios = list(piece.suite.ratios)
    cases = piece.cases(adapter)
    report, others = progress_printer(folder.name), OtherDocuments(adapter)
    found = []
    with _open_log(folder, {**run_config(adapter), "ratios": ratios}) as log:
        for done, case in enumerate(cases, 1):
            for candidate in piece.candidates():
                if candidate.ratio not in ratios:
                    continue  # plain reuse selects nothing
                one = log.get((case.sample.name, candidate.recipe.name))
                if one is None:
                    one = _measure(adapter, others, case.sample, candidate)
                    log.add(one)
                found.append(one)
            report("prompts", done, len(cases))
    return found


def _open_log(folder: Path, config: Mapping[str, Any]) -> ResultsLog[tuple[str, str], Selected]:
    return ResultsLog(
        folder,
        config,
        file="selected.jsonl",
        version=OUTCOMES_VERSION,
        key=lambda one: (one.sample, one.recipe),
        parse=lambda content: Selected(**content),
    )


def _measure(adapter: Adapter, others: OtherDocuments, sample: Sample, candidate: Candidate) -> Selected:
    prompt = render(adapter, sample)
    store = MemoryStore(others.store(sample, prompt, candidate.recipe))
    prepare_sample(adapter, store, sample, prompt, candidate.recipe)
    result = prefill(candidate.recipe, adapter, store, prompt, ratio=candidate.ratio)
    chunks = [span for span in result.plan.spans if span.kind == "chunk"]
    stale = [span for span in chunks if span.origin == "reused"]
    positions = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in stale)])
    chosen = torch.isin(positions, result.selected)
    tenth = torch.cat([(torch.arange(s.tokens) * TENTHS).div(s.tokens, rounding_mode="floor") for s in stale])
    fifth = torch.cat([torch.full((s.tokens,), n * FIFTHS // len(stale)) for n, s in enumerate(stale)])
    evidence = torch.cat([evidence_tokens(adapter, sample, span) for span in stale])
    return Selected(
        sample.task,
        sample.name,
        candidate.recipe.name,
        _shares(tenth[chosen], TENTHS),
        _shares(tenth, TENTHS),
        _shares(fifth[chosen], FIFTHS),
        _shares(fifth, FIFTHS),
        float(chosen[evidence].float().mean()) if evidence.any() else None,
        float((~evidence[chosen]).float().mean()) if chosen.any() else None,
    )


def _shares(indexes: Tensor, count: int) -> list[float]:
    counts = torch.bincount(indexes, minlength=count).double()
    return [round(share, 6) for share in (counts / counts.sum().clamp_min(1)).tolist()]


def evidence_tokens(adapter: Adapter, sample: Sample, span: PlanSpan) -> Tensor:
    """Return whether each of a chunk's tokens is in a sentence with evidence, (tokens,)."""
    assert span.chunk is not None
    text = sample.chunks[span.chunk]
    template = adapter.template
    offsets = template.token_offsets(template.chunk_ids(text), text)
    spans = list(sentences(text, clues(sample)))
    return torch.tensor(
        [any(start < end_ and end > start_ for start_, end_ in spans) for start, end in offsets]
    )


def clues(sample: Sample) -> set[str]:
    """Return the words of the reference answers, and the question's capitalized words after the first."""
    words = _WORD.findall(sample.question)[1:]
    answers = (word for answer in sample.answers for word in _WORD.findall(answer))
    return {*(word for word in words if word[0].isupper()), *answers}


def sentences(text: str, words: set[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of every sentence that contains one of the words."""
    for found in _SENTENCE.finditer(text):
        if not words.isdisjoint(_WORD.findall(found[0])):
            yield found.span()


def over_tasks(found: Sequence[Selected], value: Callable[[Selected], float | None]) -> Estimate:
    """Return the mean over tasks of a value, over the prompts that have one, of which there is at least one."""
    tasks: dict[str, list[float]] = {}
    for one in found:
        if (number := value(one)) is not None:
            tasks.setdefault(one.task, []).append(number)
    return interval_over_tasks(list(tasks.values()))


def gain(
    first: Sequence[Selected], second: Sequence[Selected], value: Callable[[Selected], float | None]
) -> Estimate:
    """Return a value for one recipe minus that for another, paired by prompt."""
    other = {one.sample: value(one) for one in second}

    def difference(one: Selected) -> float | None:
        own, compared = value(one), other.get(one.sample)
        return None if own is None or compared is None else own - compared

    return over_tasks(first, difference)
