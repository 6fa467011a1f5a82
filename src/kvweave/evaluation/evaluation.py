"""One evaluation from start to end: samples, runs, rows, and what is written down about them."""

import datetime
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.evaluation.grid import Case, Progress, candidates, evaluate, generated_cases
from kvweave.evaluation.haystack import Haystack
from kvweave.evaluation.journal import Journal
from kvweave.evaluation.readers import READERS
from kvweave.evaluation.report import About, write_report
from kvweave.evaluation.results import Row
from kvweave.evaluation.runner import Runner
from kvweave.evaluation.splits import SPLITS
from kvweave.evaluation.suites import Suite
from kvweave.evaluation.summary import rows
from kvweave.knowledge.chunking import Chunker
from kvweave.models.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Request:
    """What to evaluate.

    Attributes:
        suite: the grid; its tasks and lengths count only where no files are named.
        split: pool of generated samples.
        haystack: a folder to take natural text from instead of the split's own.
        files: benchmarks on disk, each with the name of its reader.
        overlap_tokens: what neighbouring chunks of a file's context share.
        output: where results and report go; None writes nothing.
        command: repeats the evaluation when pasted into a shell.
    """

    suite: Suite
    split: str
    haystack: Path | None = None
    files: tuple[tuple[str, Path], ...] = ()
    overlap_tokens: int = 0
    output: Path | None = None
    command: str = "kvweave eval"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The rows, what they are about, and the files written."""

    rows: list[Row]
    about: About
    files: tuple[Path, ...]


def run_evaluation(
    adapter: Adapter, request: Request, progress: Progress = lambda stage, done, of: None
) -> Evaluation:
    """Run an evaluation; interrupted with an output folder, the same call goes on where it stopped.

    Raises InvalidRequest for names that do not exist, a context too short for a task, files that cannot be read and
    an output folder of another evaluation; PromptTooLong for prompts beyond the model's context.
    """
    if request.split not in SPLITS:
        raise InvalidRequest(f"there is no split {request.split!r}; choose one of {', '.join(SPLITS)}")
    began = time.monotonic()
    suite = request.suite
    among = candidates(suite.recipes, suite.ratios)
    cases = list(_file_cases(adapter, request) if request.files else _generated(adapter, request))
    subject = {
        "model": adapter.fingerprint.digest,
        "dtype": str(adapter.geometry.dtype).removeprefix("torch."),
        "haystack": str(request.haystack.resolve()) if request.haystack else None,
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvweave-eval-") as folder,
        Journal(request.output, subject) as journal,
    ):
        runner = Runner(adapter, Path(folder), journal)
        try:
            outcomes = evaluate(cases, len(cases), among, runner, progress)
        finally:
            runner.close()
    made = rows(outcomes)
    about = _about(adapter, request, (time.monotonic() - began) / 60)
    files = write_report(request.output, made, about) if request.output else []
    return Evaluation(made, about, tuple(files))


def token_count(adapter: Adapter) -> Callable[[str], int]:
    """The token count of a text under the model's tokenizer; sentences come again and again, so it remembers."""
    counted: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in counted:
            counted[text] = len(adapter.template.text_ids(text))
        return counted[text]

    return count


def haystack_of(split: str, folder: Path | None) -> Haystack:
    """The folder's text, else the split's own."""
    return Haystack.of_folder(folder) if folder else Haystack.of_split(split)


def _generated(adapter: Adapter, request: Request) -> Iterable[Case]:
    haystack = haystack_of(request.split, request.haystack)
    return generated_cases(request.suite, request.split, haystack, token_count(adapter))


def _file_cases(adapter: Adapter, request: Request) -> Iterable[Case]:
    chunker = Chunker(adapter.tokenizer, request.suite.chunk_tokens, request.overlap_tokens)
    for reader, path in request.files:
        for sample in READERS[reader](path, chunker, request.suite.samples):
            yield Case(sample, 0, 0)


def _about(adapter: Adapter, request: Request, minutes: float) -> About:
    suite = request.suite
    return About(
        model=adapter.fingerprint.name,
        dtype=str(adapter.geometry.dtype).removeprefix("torch."),
        device=str(adapter.geometry.device),
        split=", ".join(path.name for _, path in request.files) or request.split,
        seeds=() if request.files else suite.seeds,
        samples_per_task=suite.samples,
        chunk_tokens=suite.chunk_tokens,
        context_tokens=() if request.files else suite.context_tokens,
        command=request.command,
        date=datetime.date.today().isoformat(),
        version=kvweave.__version__,
        minutes=minutes,
    )
