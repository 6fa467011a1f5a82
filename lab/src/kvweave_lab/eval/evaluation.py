"""One evaluation from start to end: samples, runs, rows, and what is written down about them."""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.index.chunking import Chunker
from kvweave.models.adapter import Adapter
from kvweave_lab.eval.crew import Crew, Work, fill
from kvweave_lab.eval.faithfulness import Judge
from kvweave_lab.eval.fitting import too_long
from kvweave_lab.eval.grid import Case, Progress, candidates, evaluate, generated_cases
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.journal import Journal
from kvweave_lab.eval.matrix import Matrix, matrices
from kvweave_lab.eval.quantisation import StorageCost, storage_costs
from kvweave_lab.eval.readers import NAMED_BY_FILE, READERS
from kvweave_lab.eval.readers.records import files
from kvweave_lab.eval.report import About, write_report
from kvweave_lab.eval.results import Outcome, Row
from kvweave_lab.eval.runner import BATCH, Candidate, Runner
from kvweave_lab.eval.samples import DOCUMENTS, beside_others
from kvweave_lab.eval.splits import SPLITS
from kvweave_lab.eval.subject import dtype_of, subject_of
from kvweave_lab.eval.suites import Suite
from kvweave_lab.eval.summary import rows

Notice = Callable[[str], None]
"""Called with a sentence for the user, before what it is about costs time."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to evaluate.

    Attributes:
        suite: the grid; its tasks, lengths, seeds and samples count only where no files are named.
        split: pool of generated samples.
        haystack: a folder to take natural text from instead of the split's own.
        files: benchmarks on disk, each with the name of its reader.
        samples_per_file: how many of each file, from its start; None reads files whole.
        overlap_tokens: what neighbouring chunks of a file's context share.
        batch: so many answers to a prompt are generated together; None leaves it to the runner.
        output: where results and report go; None writes nothing.
        judge: what decides which of an answer's facts its context bears out; None compares words. Results of two judges do
            not mix in one folder.
        command: repeats the evaluation when pasted into a shell.
    """

    suite: Suite
    split: str
    haystack: Path | None = None
    files: tuple[tuple[str, Path], ...] = ()
    samples_per_file: int | None = None
    overlap_tokens: int = 0
    batch: int | None = None
    output: Path | None = None
    judge: Judge | None = None
    command: str = "kvweave eval"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The rows, what they are about, and the files written.

    `matrices` there are where selectors ran on several preparations, `storages` where recipes ran with several of those.
    """

    rows: list[Row]
    matrices: list[Matrix]
    storages: list[StorageCost]
    about: About
    files: tuple[Path, ...]


def run_evaluation(
    adapter: Adapter,
    request: Request,
    progress: Progress = lambda stage, done, of: None,
    notice: Notice = lambda sentence: None,
    crew: Crew | None = None,
) -> Evaluation:
    """Run an evaluation; interrupted with an output folder, the same call goes on where it stopped.

    A `crew` may answer prompts in processes of their own; without one, all are answered in this one. Prompts beyond the model's context are left out and counted, and the notice says so. Raises InvalidRequest for
    names that do not exist, a context too short for a task, files that cannot be read or of which two of RULER
    hold the same task, and an output folder of another evaluation; PromptTooLong, before anything runs, if no prompt fits the model;
    EvaluationStopped if a process of the crew dies.
    """
    if request.split not in SPLITS:
        raise InvalidRequest(f"there is no split {request.split!r}; choose one of {', '.join(SPLITS)}")
    among = candidates(request.suite)
    made = list(_file_cases(adapter, request) if request.files else _generated(adapter, request))
    if not made:
        named = ", ".join(str(path) for _, path in request.files)
        raise InvalidRequest(f"there are no samples in {named}; name a file that has some")
    left_out = too_long(adapter, [case.sample for case in made])
    if left_out:
        notice(
            f"{len(left_out)} of {len(made)} prompts are left out: they are longer than the"
            f" {adapter.geometry.context_tokens} tokens that {adapter.fingerprint.name} takes, answer included"
        )
    cases = [case for case in made if case.sample.name not in left_out]
    outcomes = _outcomes(adapter, request, cases, among, progress, crew)
    found = rows(outcomes)
    compared = matrices(outcomes, found)
    about = _about(adapter, request, sum(outcome.took_s for outcome in outcomes) / 60, len(left_out))
    costs = storage_costs(outcomes)
    files = write_report(request.output, found, about, compared, costs) if request.output else []
    return Evaluation(found, compared, costs, about, tuple(files))


def _outcomes(
    adapter: Adapter,
    request: Request,
    cases: Sequence[Case],
    among: Sequence[Candidate],
    progress: Progress,
    crew: Crew | None,
) -> list[Outcome]:
    subject = {
        **subject_of(adapter, request.suite.auxiliary),
        "haystack": str(request.haystack.resolve()) if request.haystack else None,
        **({"judge": request.judge.name} if request.judge else {}),
    }
    work = Work(request.suite, request.judge, request.batch or BATCH)
    with Journal(request.output, subject) as journal:
        if crew is not None:
            fill(journal, cases, among, adapter, crew, work, progress)
        runner = Runner(adapter, journal, work.judge, work.batch)
        return evaluate(cases, len(cases), among, runner, progress)


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
    origins: dict[str, Path] = {}
    chunker = Chunker(adapter.tokenizer, request.suite.chunk_tokens, request.overlap_tokens)
    limit = request.samples_per_file
    # Enough for the other documents of the last one, which are then the same however many are asked for.
    read = None if limit is None else limit + DOCUMENTS
    for reader, path in request.files:
        for file in files(path):
            samples = READERS[reader](file, chunker, read)
            tasks = (list(alike) for _, alike in groupby(samples, key=lambda sample: sample.task))
            together = chain.from_iterable(map(beside_others, tasks))
            for sample in islice(together, limit):
                first = origins.setdefault(sample.task, file)
                if first != file and reader in NAMED_BY_FILE:
                    raise InvalidRequest(
                        f"{first} and {file} both hold {sample.task}, and one row would be the mean of both;"
                        " evaluate them one after the other, each with an --output of its own"
                    )
                yield Case(sample, 0, 0)


def _about(adapter: Adapter, request: Request, minutes: float, left_out: int) -> About:
    suite = request.suite
    return About(
        model=adapter.fingerprint.name,
        dtype=dtype_of(adapter),
        device=str(adapter.geometry.device),
        split=", ".join(path.name for _, path in request.files) or request.split,
        seeds=() if request.files else suite.seeds,
        samples=request.samples_per_file if request.files else suite.samples,
        left_out=left_out,
        chunk_tokens=suite.chunk_tokens,
        context_tokens=() if request.files else suite.context_tokens,
        command=request.command,
        date=datetime.date.today().isoformat(),
        version=kvweave.__version__,
        minutes=minutes,
    )
