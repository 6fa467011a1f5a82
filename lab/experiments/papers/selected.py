"""Where the rows lie that recipes recompute: in their chunks, among the chunks, and in what the answer rests on.

Prompts are prefilled, not answered. Like the journal of an evaluation, a file for each piece of a grid keeps what was found.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.recipe import run as prefill
from kvweave.types import PlanSpan
from kvweave_lab.eval.fitting import render
from kvweave_lab.eval.journal import JOURNAL_VERSION
from kvweave_lab.eval.preparing import OtherDocuments, prepare_sample
from kvweave_lab.eval.results import Estimate
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.statistics import interval_over_tasks
from kvweave_lab.eval.subject import subject_of
from side_by_side import Grid, each_piece, model, teller

TENTHS, FIFTHS = 10, 5
_SENTENCE = re.compile(r"[^.!?]+[.!?]*")
_WORD = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Selected:
    """One prompt under one recipe; shares of the rows that were selected, and of all that could have been.

    Attributes:
        tenths: by tenth of their chunk.
        stale_tenths: the same of all stale rows.
        fifths: by fifth of the stale chunks, in prompt order.
        stale_fifths: the same of all stale rows.
        evidence: share of the stale rows in evidence that were selected; None where no evidence is stale.
        beside: share of the selected rows that are no evidence; None where none were selected.
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
    """Every recipe of the grid, which has one ratio, on every prompt; what the folder holds is not computed again."""
    return list(chain.from_iterable(each_piece(_selected, grid, folder, processes)))


def _selected(piece: Grid, folder: Path) -> list[Selected]:
    adapter = model(piece.model)
    ratios = list(piece.suite.ratios)
    versions = {"journal": JOURNAL_VERSION, "kvweave version": kvweave.__version__}
    subject = {**versions, **subject_of(adapter), "ratios": ratios}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "selected.jsonl"
    before = _read(path, subject)
    cases = piece.cases(adapter)
    tell, others = teller(folder.name), OtherDocuments(adapter)
    found = []
    with path.open("a", encoding="utf-8") as kept:
        if not before and not path.stat().st_size:
            kept.write(json.dumps(subject) + "\n")
        for done, case in enumerate(cases, 1):
            for candidate in piece.candidates():
                if candidate.ratio not in ratios:
                    continue  # plain reuse selects nothing
                one = before.get((case.sample.name, candidate.recipe.name))
                if one is None:
                    one = _look(adapter, others, case.sample, candidate)
                    kept.write(json.dumps(asdict(one)) + "\n")
                    kept.flush()
                found.append(one)
            tell("prompts", done, len(cases))
    return found


def _read(path: Path, subject: Mapping[str, object]) -> dict[tuple[str, str], Selected]:
    """What was found before; a line torn by a crash is cut off."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    path.write_bytes(whole)
    lines = [json.loads(line) for line in whole.splitlines()]
    said = lines[0] if lines else subject
    if changed := sorted(name for name in {*said, *subject} if said.get(name) != subject.get(name)):
        raise InvalidRequest(
            f"{path} holds selections that differ in {', '.join(changed)}; name another --work"
        )
    found = [Selected(**line) for line in lines[1:]]
    return {(one.sample, one.recipe): one for one in found}


def _look(adapter: Adapter, others: OtherDocuments, sample: Sample, candidate: Candidate) -> Selected:
    prompt = render(adapter, sample)
    store = MemoryStore(others.store(sample, prompt, candidate.recipe))
    prepare_sample(adapter, store, sample, prompt, candidate.recipe)
    result = prefill(candidate.recipe, adapter, store, prompt, ratio=candidate.ratio)
    chunks = [span for span in result.plan.spans if span.kind == "chunk"]
    stale = [span for span in chunks if span.origin == "reused"]
    places = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in stale)])
    chosen = torch.isin(places, result.selected)
    tenth = torch.cat([(torch.arange(s.tokens) * TENTHS).div(s.tokens, rounding_mode="floor") for s in stale])
    fifth = torch.cat([torch.full((s.tokens,), n * FIFTHS // len(stale)) for n, s in enumerate(stale)])
    needed = torch.cat([_evidence(adapter, sample, span) for span in stale])
    return Selected(
        sample.task,
        sample.name,
        candidate.recipe.name,
        _shares(tenth[chosen], TENTHS),
        _shares(tenth, TENTHS),
        _shares(fifth[chosen], FIFTHS),
        _shares(fifth, FIFTHS),
        float(chosen[needed].float().mean()) if needed.any() else None,
        float((~needed[chosen]).float().mean()) if chosen.any() else None,
    )


def _shares(places: Tensor, count: int) -> list[float]:
    counted = torch.bincount(places, minlength=count).double()
    return [round(share, 6) for share in (counted / counted.sum().clamp_min(1)).tolist()]


def _evidence(adapter: Adapter, sample: Sample, span: PlanSpan) -> Tensor:
    """(tokens,) whether each of a chunk's tokens stands in a sentence that the answer rests on."""
    assert span.chunk is not None
    text = sample.chunks[span.chunk]
    template = adapter.template
    offsets = template.align(template.chunk_ids(text), text)
    inside = list(sentences(text, clues(sample)))
    return torch.tensor(
        [any(start < end_ and end > start_ for start_, end_ in inside) for start, end in offsets]
    )


def clues(sample: Sample) -> set[str]:
    """Words of the reference answers, and names in the question: what is written large there behind its first word."""
    asked = _WORD.findall(sample.question)[1:]
    answers = (word for answer in sample.answers for word in _WORD.findall(answer))
    return {*(word for word in asked if word[0].isupper()), *answers}


def sentences(text: str, words: set[str]) -> Iterator[tuple[int, int]]:
    """First character and the one after the last of every sentence that holds one of the words."""
    for found in _SENTENCE.finditer(text):
        if not words.isdisjoint(_WORD.findall(found[0])):
            yield found.span()


def over_tasks(found: Sequence[Selected], value: Callable[[Selected], float | None]) -> Estimate:
    """The mean over tasks of a value, of the prompts that have one; at least one has to."""
    tasks: dict[str, list[float]] = {}
    for one in found:
        if (number := value(one)) is not None:
            tasks.setdefault(one.task, []).append(number)
    return interval_over_tasks(list(tasks.values()))


def gain(
    mine: Sequence[Selected], theirs: Sequence[Selected], value: Callable[[Selected], float | None]
) -> Estimate:
    """How much larger a value is for one recipe than for another, prompt by prompt."""
    other = {one.sample: value(one) for one in theirs}

    def difference(one: Selected) -> float | None:
        my, their = value(one), other.get(one.sample)
        return None if my is None or their is None else my - their

    return over_tasks(mine, difference)
