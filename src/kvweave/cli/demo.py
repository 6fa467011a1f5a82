"""demo: index the sample documents and answer questions with and without reuse, cold and warm."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_nothing

if TYPE_CHECKING:
    from rich.text import Text

    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.results import Answer
    from kvweave.samples import SampleQuestion

_SPEED_SHAPE = "qwen2.5-0.5b"
_SPEED_CHUNKS, _SPEED_CHUNK_TOKENS = 4, 256
"""A prompt that a CPU without matrix units prefills in ten seconds; it is prefilled four times."""


class Asked(NamedTuple):
    """One sample question, and its answers by full prefill, by plain reuse, and by the default recipe, cold and warm."""

    question: "SampleQuestion"
    answers: "dict[str, Answer]"


@keeps_nothing
def demo(
    speed: Annotated[
        bool,
        typer.Option(
            "--speed/--no-speed", help="Also time a model in the shape of Qwen2.5-0.5B (random weights)."
        ),
    ] = True,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Index the sample documents and ask about them, cold and warm, in a temporary folder."""
    from kvweave.cli.output import STDERR, print_json, progress_bar

    opt.quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvweave-demo-") as folder:
        with _one_thread(), _sample_kb(Path(folder)) as base:
            from kvweave.samples import DOCUMENTS

            with progress_bar(quiet or json) as report:
                done = base.add(DOCUMENTS, progress=report)
            if not json:
                _print_indexing(done.chunks, len(done.added), base)
            asked = _ask_all(base)
        times = None
        if speed:
            if not json:
                STDERR.print(f"\ntiming a model in the shape of {_SPEED_SHAPE} with random weights …")
            times = _measure_speed(Path(folder))
    if json:
        print_json({"questions": [_row(a) for a in asked], "speed": times})
        return
    _print_answers(asked)
    if times is not None:
        _print_speed(times)


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


def _sample_kb(home: Path) -> "KnowledgeBase":
    from kvweave.knowledge_base import open_knowledge_base
    from kvweave.samples import CHUNK_TOKENS, TOP_K

    return open_knowledge_base("demo", home=home, model="reference", chunk_tokens=CHUNK_TOKENS, top_k=TOP_K)


def _ask_all(base: "KnowledgeBase") -> list[Asked]:
    """Answer every question in each way, after one question that loads the models, so that no timed run includes loading."""
    from kvweave.samples import sample_questions

    questions = sample_questions()
    base.ask(questions[0].text, recipe="full", cache="off")
    asked = []
    for question in questions:
        ask = partial(base.ask, question.text, cache="off")
        answers = {"full": ask(recipe="full"), "plain": ask(recipe="reuse")}
        base.store.forget_recent()
        asked.append(Asked(question, {**answers, "cold": ask(), "warm": ask()}))
    return asked


def _row(asked: Asked) -> dict[str, object]:
    answers, warm = asked.answers, asked.answers["warm"]
    return {
        "question": asked.question.text,
        "expected": asked.question.answer,
        "full_answer": answers["full"].text,
        "plain_reuse_answer": answers["plain"].text,
        "answer": warm.text,
        "sources": sorted({Path(source.document).name for source in warm.sources}),
        **{f"{name}_ttft_s": _ttft_s(answers[name]) for name in ("full", "cold", "warm")},
        "reused_share": warm.plan.reused_share,
        "prompt_tokens": warm.plan.prompt_tokens,
    }


def _ttft_s(answer: "Answer") -> float:
    return answer.timing.ttft_s - answer.timing.retrieve_s


def _measure_speed(folder: Path) -> dict[str, float]:
    """Return the times of full prefill and of cold and warm reuse of one prompt: medians of three interleaved rounds."""
    import statistics

    from kvweave import ChunkStore, Prompt, prepare
    from kvweave.models.shapes import random_model
    from kvweave.recipes.methods import recipe_named
    from kvweave.recipes.recipe import run
    from kvweave.samples import DOCUMENTS

    adapter = random_model(_SPEED_SHAPE)
    words = " ".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.iterdir())).split()
    chunks = tuple(
        adapter.tokenizer.decode(
            adapter.template.chunk_ids(" ".join((words[i * 97 :] + words) * 2))[:_SPEED_CHUNK_TOKENS]
        )
        for i in range(_SPEED_CHUNKS)
    )
    tokens = adapter.template.render(Prompt("What is the password of Glorric?", chunks))
    times: dict[str, list[float]] = {"full": [], "cold": [], "warm": []}
    with ChunkStore(folder / "speed") as store:
        prepare(adapter, store, chunks, recipe="reuse")
        for _ in range(3):
            store.forget_recent()
            times["cold"].append(run(recipe_named("reuse"), adapter, store, tokens).timing.ttft_s)
            warm = run(recipe_named("reuse"), adapter, store, tokens)
            times["warm"].append(warm.timing.ttft_s)
            times["full"].append(run(recipe_named("full"), adapter, store, tokens).timing.ttft_s)
    medians = {f"{name}_ttft_s": statistics.median(values) for name, values in times.items()}
    return {"prompt_tokens": tokens.tokens, "reused_share": warm.plan.reused_share, **medians}


def _print_indexing(chunks: int, documents: int, base: "KnowledgeBase") -> None:
    from kvweave.cli.output import STDOUT, amount

    size = base.store.stats().bytes
    STDOUT.print(
        f"indexed {documents} sample documents as {chunks} chunks; their KV takes {amount(size)} on disk\n"
    )


def _print_answers(asked: list[Asked]) -> None:
    from rich.table import Table

    from kvweave.cli.output import STDOUT, seconds, share

    table = Table(title="Answers of the shipped reference model", title_justify="left", header_style="bold")
    for name in ("question", "full prefill", "plain reuse", "default"):
        table.add_column(name, overflow="fold")
    for one in asked:
        texts = [one.answers[name].text for name in ("full", "plain", "warm")]
        table.add_row(one.question.text, *(_marked(text, one.question.answer) for text in texts))
    STDOUT.print(table)
    STDOUT.print(
        "A cross marks a wrong answer. Plain reuse loses what one chunk says about another. The default recipe prepares "
        "each chunk after the one before it and recomputes a tenth of its tokens; `--ratio 1` recomputes everything.\n"
    )
    times = Table(title="Time to first token", title_justify="left", header_style="bold")
    times.add_column("question", overflow="fold")
    for name in ("full", "cold", "warm", "reused"):
        times.add_column(name, justify="right", no_wrap=True, min_width=5 if name != "reused" else 10)
    for one in asked:
        measured = [seconds(_ttft_s(one.answers[name])) for name in ("full", "cold", "warm")]
        plan = one.answers["warm"].plan
        reused = f"{share(plan.reused_share)} of {plan.prompt_tokens}"
        times.add_row(one.question.text, *measured, reused)
    STDOUT.print(times)
    STDOUT.print(
        "The time from the retrieved chunks to the first token's logits. Cold: kvweave reads stored KV from the disk. This model is "
        "tiny and runs on one thread, so Python itself takes most of the remaining time."
    )


def _marked(text: str, expected: str) -> "Text":
    from rich.text import Text

    return Text.assemble(text, (" ✓", "green") if text == expected else (" ✗", "red"))


def _print_speed(times: dict[str, float]) -> None:
    from rich.table import Table

    from kvweave.cli.output import STDOUT, seconds, share

    STDOUT.print()
    table = Table(
        title=f"In the shape of Qwen2.5-0.5B: {times['prompt_tokens']:.0f} tokens, {share(times['reused_share'])} reused",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("")
    table.add_column("TTFT", justify="right")
    table.add_column("share of full", justify="right")
    for name, what in (
        ("full", "full prefill"),
        ("cold", "reuse, read from the disk"),
        ("warm", "reuse, warm"),
    ):
        value = times[f"{name}_ttft_s"]
        table.add_row(what, seconds(value), share(value / times["full_ttft_s"]))
    STDOUT.print(table)
