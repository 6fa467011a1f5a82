"""The analysis of selections over tasks, chunk sizes and context lengths."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave_lab.eval.evaluation import haystack_of, token_count
from kvweave_lab.eval.samples import Sample, Setting, generate
from kvweave_lab.eval.selection.analysis import analyse
from kvweave_lab.eval.selection.files import write_selection, write_sweep
from kvweave_lab.eval.selection.report import SelectionReport
from kvweave_lab.eval.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to analyse: every context length with every chunk size.

    Attributes:
        tasks: names; samples of all of them make one report.
        split: pool of the samples.
        seed: of the samples.
        samples: prompts per task.
        context_tokens: lengths in tokens.
        chunk_tokens: largest chunks in tokens.
        ratio: share of the context tokens that selections take.
        answered_ratios: shares at which prompts are also answered with the selected tokens recomputed.
        haystack: a folder to take natural text from instead of the split's own.
    """

    tasks: tuple[str, ...]
    split: str
    seed: int
    samples: int
    context_tokens: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    ratio: float
    answered_ratios: tuple[float, ...] = ()
    haystack: Path | None = None


def run_sweep(
    adapter: Adapter,
    auxiliary: Adapter | None,
    sweep: Sweep,
    progress: Progress = lambda stage, done, total: None,
) -> Mapping[str, SelectionReport]:
    """A report per setting, named after its lengths; what the sweep names twice counts once.

    Raises as `analyse` does, and for tasks that do not exist.
    """
    for task in sweep.tasks:
        if task not in TASKS:
            raise InvalidRequest(f"there is no task {task!r}; choose from {', '.join(TASKS)}")
    reports = {}
    for context_tokens in dict.fromkeys(sweep.context_tokens):
        for chunk_tokens in dict.fromkeys(sweep.chunk_tokens):
            name = f"{context_tokens} tokens in chunks of {chunk_tokens}"
            samples = _samples(adapter, sweep, context_tokens, chunk_tokens)
            with tempfile.TemporaryDirectory(prefix="kvweave-eval-") as folder:
                reports[name] = analyse(
                    adapter,
                    Path(folder),
                    samples,
                    ratio=sweep.ratio,
                    answered_ratios=sweep.answered_ratios,
                    auxiliary=auxiliary,
                    progress=_named(name, progress),
                )
    return reports


def write(folder: Path, reports: Mapping[str, SelectionReport]) -> list[Path]:
    """Every report's files, in a folder each if there are several, and then what compares them."""
    if len(reports) == 1:
        return list(write_selection(folder, next(iter(reports.values()))))
    files = [
        path
        for name, report in reports.items()
        for path in write_selection(folder / name.replace(" ", "-"), report)
    ]
    return [*files, *write_sweep(folder, reports)]


def _named(name: str, progress: Progress) -> Progress:
    """Progress under a setting's name."""
    return lambda stage, done, total: progress(name, done, total)


def _samples(adapter: Adapter, sweep: Sweep, context_tokens: int, chunk_tokens: int) -> list[Sample]:
    count, haystack = token_count(adapter), haystack_of(sweep.split, sweep.haystack)
    setting = Setting(sweep.split, sweep.seed, context_tokens, chunk_tokens)
    return [
        sample
        for task in dict.fromkeys(sweep.tasks)
        for sample in generate(task, setting, sweep.samples, count, haystack)
    ]
