"""One evaluation from start to end: samples, runs, rows, and the report."""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path

import kvweave
from kvweave.documents.chunking import Chunker
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.support import middle_layers
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.comparisons import Matrix, StorageCost, matrices, storage_costs
from kvweave_lab.eval.grid import Case, Suite, candidates_of, evaluate, generated_cases
from kvweave_lab.eval.metrics import Judge
from kvweave_lab.eval.outcomes import Outcome, OutcomeLog
from kvweave_lab.eval.preparation import too_long
from kvweave_lab.eval.readers import NAMED_BY_FILE, READERS, jsonl_files
from kvweave_lab.eval.report import About, write_report
from kvweave_lab.eval.rows import Row, summary_rows
from kvweave_lab.eval.runner import BATCH, Candidate, Runner
from kvweave_lab.eval.samples import OTHER_DOCUMENTS, with_other_documents
from kvweave_lab.eval.workers import Workers, WorkerTask, fill_log
from kvweave_lab.eval.world import SPLITS, Haystack
from kvweave_lab.recipes.names import name_parts
from kvweave_lab.results_log import dtype_name, run_config

Notice = Callable[[str], None]
"""Called with a sentence for the user, before work begins that takes time."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to evaluate.

    Attributes:
        suite: the grid; its tasks, lengths, seeds and samples apply to generated samples only.
        split: pool of generated samples.
        haystack: a folder with natural text instead of the split's own.
        files: benchmarks on disk, each with the name of its reader; they replace generated samples.
        samples_per_file: number of samples from the start of each file; None reads files whole.
        overlap_tokens: tokens that neighbouring chunks of a file's context share.
        batch: number of answers to a prompt that are generated together; None is the runner's default.
        output: folder of results and report; None writes nothing.
        judge: decides which of an answer's facts its context contains; None compares words. Results of two judges
            do not mix in one folder.
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

    There are `matrices` if selectors ran on several preparations, and `storages` if recipes ran with several storages.
    """

    rows: list[Row]
    matrices: list[Matrix]
    storages: list[StorageCost]
    about: About
    files: tuple[Path, ...]


def run_evaluation(
    adapter: Adapter,
    request: Request,
    progress: Progress = no_progress,
    notice: Notice = lambda sentence: None,
    workers: Workers | None = None,
) -> Evaluation:
    """Run an evaluation. With an output folder, the same call resumes an interrupted one.

    `workers` may answer prompts in processes of their own; without them, this process answers all. Prompts that are too
    long for the model are left out and counted, and the notice says so.

    Raises:
        InvalidRequest: unknown names, a context too short for a task, files that cannot be read, two files of RULER
            with the same task, or an output folder of another evaluation.
        PromptTooLong: before anything runs, if no prompt fits the model.
        EvaluationStopped: a worker died.
    """
    if request.split not in SPLITS:
        raise InvalidRequest(f"there is no split {request.split!r}; choose one of {', '.join(SPLITS)}")
    candidates = candidates_of(request.suite)
    _note_layers(adapter, candidates, notice)
    found = list(file_cases(adapter, request) if request.files else _generated_cases(adapter, request))
    if not found:
        named = ", ".join(str(path) for _, path in request.files)
        raise InvalidRequest(f"there are no samples in {named}; name a file that has some")
    left_out = too_long(adapter, [case.sample for case in found])
    if left_out:
        notice(
            f"{len(left_out)} of {len(found)} prompts are left out: they are longer than the"
            f" {adapter.geometry.context_tokens} tokens that {adapter.fingerprint.name} takes, answer included"
        )
    cases = [case for case in found if case.sample.name not in left_out]
    outcomes = _outcomes(adapter, request, cases, candidates, progress, workers)
    rows = summary_rows(outcomes)
    compared = matrices(outcomes, rows)
    about = _about(adapter, request, sum(outcome.took_s for outcome in outcomes) / 60, len(left_out))
    costs = storage_costs(outcomes)
    files = write_report(request.output, rows, about, compared, costs) if request.output else []
    return Evaluation(rows, compared, costs, about, tuple(files))


def _note_layers(adapter: Adapter, candidates: Sequence[Candidate], notice: Notice) -> None:
    """Say with which layers qcfuse scores, and how to measure better ones."""
    if not any(name_parts(candidate.recipe.name)[0] == "qcfuse" for candidate in candidates):
        return
    layers = ", ".join(map(str, adapter.critical_layers))
    middle = adapter.critical_layers == middle_layers(adapter.geometry.layers)
    unmeasured = "; `kvweave profile-layers` measures which are best" if middle else ""
    notice(f"qcfuse scores tokens with layers {layers}{unmeasured}")


def token_count(adapter: Adapter) -> Callable[[str], int]:
    """Return a function that counts a text's tokens under the model's tokenizer; it remembers every text."""
    counted: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in counted:
            counted[text] = len(adapter.template.tokenize(text))
        return counted[text]

    return count


def haystack_of(split: str, folder: Path | None) -> Haystack:
    """Return the folder's text, or the split's own without a folder."""
    return Haystack.of_folder(folder) if folder else Haystack.of_split(split)


def _outcomes(
    adapter: Adapter,
    request: Request,
    cases: Sequence[Case],
    candidates: Sequence[Candidate],
    progress: Progress,
    workers: Workers | None,
) -> list[Outcome]:
    config = {
        **run_config(adapter, request.suite.auxiliary),
        "haystack": str(request.haystack.resolve()) if request.haystack else None,
        **({"judge": request.judge.name} if request.judge else {}),
    }
    task = WorkerTask(request.suite, request.judge, request.batch or BATCH)
    with OutcomeLog(request.output, config) as log:
        if workers is not None:
            fill_log(log, cases, candidates, adapter, workers, task, progress)
        runner = Runner(adapter, log, task.judge, task.batch)
        return evaluate(cases, len(cases), candidates, runner, progress)


def _generated_cases(adapter: Adapter, request: Request) -> Iterable[Case]:
    haystack = haystack_of(request.split, request.haystack)
    return generated_cases(request.suite, request.split, haystack, token_count(adapter))


def file_cases(adapter: Adapter, request: Request) -> Iterable[Case]:
    """Yield the cases of the documents in files, in the order of the suite."""
    first_file: dict[str, Path] = {}
    chunker = Chunker(adapter.tokenizer, request.suite.chunk_tokens, request.overlap_tokens)
    limit = request.samples_per_file
    # Enough for the other documents of the last sample, so that they do not depend on the limit.
    read_limit = None if limit is None else limit + OTHER_DOCUMENTS
    for reader, path in request.files:
        for file in jsonl_files(path):
            samples = READERS[reader](file, chunker, read_limit)
            tasks = (list(group) for _, group in groupby(samples, key=lambda sample: sample.task))
            complete = chain.from_iterable(map(with_other_documents, tasks))
            for sample in islice(complete, limit):
                first = first_file.setdefault(sample.task, file)
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
        dtype=dtype_name(adapter),
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
        critical_layers=tuple(adapter.critical_layers),
    )
