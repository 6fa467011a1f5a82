"""train-selector: teach the auxiliary model to attend as the model that answers does."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.models.adapter import Adapter
    from kvweave.types import Prompt
    from kvweave_lab.tuning.selector import TuningResult

CONTEXT_TOKENS, CHUNK_TOKENS = 512, 96  # generated prompts


@opt.with_options(
    *opt.KB, "model", "auxiliary", "dtype", "device", "top_k", top_k="Chunks per question. Default: 5."
)
def train_selector(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            help="New folder for the tuned model. The same command resumes an interrupted run, minus 25 steps at most.",
            show_default=False,
        ),
    ],
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="File with one question per line for the knowledge base. Default: generated documents and questions.",
        ),
    ] = None,
    *,
    options: opt.SharedOptions,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Generated prompts per task.")] = 20,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Training steps; each has four prompts.")
    ] = 300,
    rate: Annotated[float, typer.Option("--rate", help="Highest learning rate.")] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of the prompts.")] = 0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Fine-tune the model that cacheclip selects with.

    It learns to attend as the model that answers does.
    """
    from dataclasses import asdict

    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave_lab.tuning.selector import Settings, tune

    opt.quiet_libraries()
    settings = Settings(steps=steps, rate=rate, seed=seed)
    adapter, prompts = _generated(options, samples) if questions is None else _asked(options, questions)
    with progress_bar(quiet or json) as progress:
        result = tune(adapter, options.auxiliary, prompts, output, settings, progress)
    if json:
        print_json({"folder": str(output), **asdict(result)})
        return
    STDOUT.print(_table(result))
    STDOUT.print(f"[dim]name it as --auxiliary {output} in add, ask and eval[/]", soft_wrap=True)


def _asked(options: opt.SharedOptions, questions: Path) -> "tuple[Adapter, list[Prompt]]":
    """Return the model of the knowledge base, and its prompts for the questions in a file."""
    texts = _questions(questions)
    with replace(options, auxiliary=None).open_kb() as base:  # here it is the model to tune
        return base.adapter, [base.prompt(question, top_k=options.top_k) for question in texts]


def _questions(path: Path) -> list[str]:
    """Return the different non-empty lines of a file."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    questions = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not questions:
        raise InvalidRequest(f"{path} holds no questions; write one per line")
    return questions


def _generated(options: opt.SharedOptions, samples: int) -> "tuple[Adapter, list[Prompt]]":
    """Return the model and prompts of every task: facts of the split `train`, natural text of the split `dev`."""
    from kvweave.types import Prompt
    from kvweave_lab.eval.evaluation import haystack_of, token_count
    from kvweave_lab.eval.samples import SampleSpec, generate
    from kvweave_lab.eval.tasks import TASKS
    from kvweave_lab.eval.world import DEV, TRAIN

    adapter = options.load_model()
    spec = SampleSpec(TRAIN, 0, CONTEXT_TOKENS, CHUNK_TOKENS)
    count, haystack = token_count(adapter), haystack_of(DEV, None)
    prompts = [
        Prompt(sample.question, sample.chunks)
        for task in TASKS
        for sample in generate(task, spec, samples, count, haystack)
    ]
    return adapter, prompts


def _table(result: "TuningResult") -> "Table":
    from rich.table import Table

    from kvweave.cli.output import share

    table = Table(
        "",
        "KL, nats",
        "top 20 % in common (Jaccard)",
        title=f"on {result.held_out} prompts held out; trained on {result.trained_on}, {result.left_out} too long",
        box=None,
        header_style="bold",
    )
    for name, found in (("before", result.before), ("after", result.after)):
        table.add_row(name, f"{found.kl:.3f}", share(found.jaccard))
    return table
