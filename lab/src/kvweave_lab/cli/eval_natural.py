"""eval natural: recipes on documents that people could have written, in contexts that the product retrieves."""

import datetime
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.recipes.names import UNCALIBRATED
from kvweave.version import __version__
from kvweave_lab.cli import bench_options as bench
from kvweave_lab.cli.bench_weights import VARIANTS
from kvweave_lab.cli.evaluate import HOME_TEXT, MODEL_TEXT, print_notice

if TYPE_CHECKING:
    from kvweave_lab.eval.natural.run import Request


@dataclass(frozen=True, slots=True)
class NaturalOptions:
    """The options of `eval natural` except the model's: the set, the contexts, and the recipes that run on them."""

    documents: Annotated[
        Path | None,
        typer.Option("--documents", help="Folder with your own documents (.md and .txt); needs --questions."),
    ] = None
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="File with questions about --documents: JSON lines with id, question, answers, kind and evidence.",
        ),
    ] = None
    split: Annotated[str, typer.Option("--split", help="dev (to tune on) or test (to report).")] = "dev"
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="Kind of question in the set, such as within or unanswerable; repeatable. Default: all with an answer.",
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Number of questions. Default: all of the split.")
    ] = None
    context_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--context-tokens",
            min=64,
            help="Length of the context; repeatable. Default: 1024, 2048, 4096, 8192.",
        ),
    ] = None
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens", min=16, help="Tokens of the longest chunk. Default: as in a knowledge base."
        ),
    ] = None
    distractors: Annotated[
        int,
        typer.Option(
            "--distractors", min=0, help="Number of pages of installed documentation to add to the documents."
        ),
    ] = 500
    examples: Annotated[
        int,
        typer.Option(
            "--examples",
            min=0,
            max=3,
            help="Number of worked examples before the context; 0 uses the product's own prompt.",
        ),
    ] = 3
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="Recipe to run, or RECIPE:RATIO for one with a single ratio; repeatable. Default: all.",
        ),
    ] = None
    prepare: Annotated[
        list[str] | None,
        typer.Option(
            "--prepare", help="Also run the recipes that select on chunks with this preparation; repeatable."
        ),
    ] = None
    storage: Annotated[
        list[str] | None,
        typer.Option("--storage", help="Also run recipes on chunk KV stored as int8 or int4; repeatable."),
    ] = None
    auxiliary: Annotated[str | None, opt.declared("auxiliary")] = None
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            min=0,
            max=1,
            help="Share of stale context to recompute; repeatable. Default: 0.1, 0.3.",
        ),
    ] = None
    coverage: Annotated[
        list[float] | None,
        typer.Option(
            "--coverage",
            min=0,
            max=1,
            help="Recompute the tokens that hold this share of scores; repeatable.",
        ),
    ] = None
    against: Annotated[
        str,
        typer.Option(
            "--against", help="Method that all others are compared with, in pairs on the same prompts."
        ),
    ] = UNCALIBRATED
    answers: Annotated[
        int,
        typer.Option(
            "--answers",
            min=0,
            help="Also generate answers of at most so many tokens, such as 64; 0 for none.",
        ),
    ] = 0
    rounded: Annotated[
        list[str] | None,
        typer.Option(
            "--rounded",
            help="Also run full attention with weights of bfloat16, float16, int8 or int4: a loss to compare with; repeatable.",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0,
            help="Begin no other prompt after so many minutes, and report those that are done. The same command with --output continues.",
        ),
    ] = None
    retrieval: Annotated[
        bool, typer.Option("--retrieval", help="Measure only retrieval, without a language model.")
    ] = False
    kv: Annotated[
        Path | None,
        typer.Option(
            "--kv",
            help="Folder for prepared KV, which later runs use again. Default: a folder in the user's cache.",
        ),
    ] = None
    kv_limit: Annotated[
        str,
        typer.Option("--kv-limit", help="Largest size of that folder, such as 20GB."),
    ] = "20GB"
    index: Annotated[
        Path | None,
        typer.Option("--index", help="Folder for the index. Default: a folder in the user's cache."),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for JSON. The same command resumes there.")
    ] = None

    def request(self) -> "Request":
        """Return the evaluation that the options ask for; raises InvalidRequest for impossible options."""
        from kvweave_lab.eval.natural import run
        from kvweave_lab.eval.natural.prompts import LENGTHS

        return run.Request(
            recipes=tuple(self.recipe or run.RECIPES),
            ratios=tuple(self.ratio or (() if self.coverage else run.RATIOS)),
            coverages=tuple(self.coverage or ()),
            preparations=tuple(self.prepare or ()),
            storages=tuple(self.storage or ("exact",)),
            auxiliary=self.auxiliary,
            lengths=tuple(self.context_tokens or LENGTHS),
            chunk_tokens=self.chunk_tokens,
            split=self.split,
            kinds=tuple(self.kind or ()),
            limit=self.limit,
            examples=self.examples,
            distractors=self.distractors,
            answers=self.answers,
            minutes=math.inf if self.minutes is None else self.minutes,
            against=self.against,
            documents=self.documents,
            questions=self.questions,
            index=self.index,
            output=self.output,
            kv=self.kv,
            kv_bytes=opt.size_bytes(self.kv_limit),
        )


@bench.keeps_output
@opt.with_options(*opt.MODEL, "home", "embedding_model", model=MODEL_TEXT, home=HOME_TEXT)
def natural(
    *, model: opt.SharedOptions, options: NaturalOptions, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Natural documents and retrieved contexts: every recipe's answers and distributions against full attention's."""
    from kvweave.cli.output import progress_bar
    from kvweave.embedding import TextEncoder
    from kvweave_lab.eval.natural.run import NaturalBenchmark, NaturalResult, read_request_set

    opt.quiet_libraries()
    request = options.request()
    content = read_request_set(request)  # before a model is loaded
    formats = {
        name: VARIANTS[name] for name in bench.chosen(options.rounded or (), list(VARIANTS), "number format")
    }
    adapter = model.load_model()
    rounded = {
        name: replace(model, dtype=dtype, weights=bits).load_model()
        for name, (dtype, bits) in formats.items()
    }
    with progress_bar(quiet or json) as progress:
        benchmark = NaturalBenchmark(
            adapter, request, content, TextEncoder(model.embedding_model), progress, rounded
        )
        if options.retrieval:
            done = NaturalResult(benchmark.retrieval(progress))
        else:
            done = benchmark.run(print_notice, progress)
    about = {
        **bench.environment(),
        **benchmark.about(),
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    _show(options, done, about, json=json)


def _show(options: NaturalOptions, done: Any, about: dict[str, Any], *, json: bool) -> None:
    from kvweave.cli.output import STDOUT, print_json
    from kvweave_lab.eval.natural.report import content, tables, write
    from kvweave_lab.report import few_prompts_warning

    files = write(options.output, done, about) if options.output else []
    prompts = min((row.prompts for row in done.rows), default=done.retrieval.questions)
    if warning := few_prompts_warning(prompts):
        print_notice(warning)
    if json:
        print_json(content(done, about))
        return
    for table in tables(done):
        STDOUT.print(table)
        STDOUT.print()
    bench.print_paths(files)
