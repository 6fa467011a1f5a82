"""train-selector: teach the auxiliary model where the model that answers looks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.models.adapter import Adapter
    from kvweave.types import Prompt
    from kvweave_lab.tuning.selector import Tuned

CONTEXT_TOKENS, CHUNK_TOKENS = 512, 96  # of generated prompts


def train_selector(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            help="New folder for the tuned model. Interrupted, the same command goes on, less 25 steps at most.",
            show_default=False,
        ),
    ],
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="File with a question a line, to ask the knowledge base. Default: generated documents and questions.",
        ),
    ] = None,
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    auxiliary: opt.Auxiliary = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    top_k: Annotated[
        int | None, typer.Option(envvar="KVWEAVE_TOP_K", help="Chunks to a question. Default: 5.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Generated prompts per task.")] = 20,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of four prompts each.")] = 300,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate at its highest.")] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="Of the order of the prompts.")] = 0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Fine-tune the auxiliary model that cacheclip selects tokens with towards the model that answers."""
    from dataclasses import asdict

    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.models.loading import load_model
    from kvweave_lab.tuning.selector import Settings, tune

    opt.quiet_libraries()
    settings = Settings(steps=steps, rate=rate, seed=seed)
    if questions is None:
        adapter = load_model(model, dtype=dtype or "auto", device=device or "auto")
        prompts = _generated(adapter, samples)
    else:
        asked = _questions(questions)
        with opt.open_kb(kb, home, model=model, dtype=dtype, device=device) as base:
            adapter, prompts = base.adapter, [base.prompt(question, top_k=top_k) for question in asked]
    with progress_bar(quiet or json) as report:
        tuned = tune(adapter, auxiliary, prompts, output, settings, report)
    if json:
        print_json({"folder": str(output), **asdict(tuned)})
        return
    STDOUT.print(_table(tuned))
    STDOUT.print(f"[dim]name it as --auxiliary {output} in add, ask and eval[/]", soft_wrap=True)


def _questions(path: Path) -> list[str]:
    """The lines of a file that say something, each once."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    asked = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not asked:
        raise InvalidRequest(f"{path} holds no questions; write one a line")
    return asked


def _generated(adapter: "Adapter", samples: int) -> "list[Prompt]":
    """Prompts of every task: facts from the pool to train on, among natural text from the one to tune on."""
    from kvweave.types import Prompt
    from kvweave_lab.eval.evaluation import haystack_of, token_count
    from kvweave_lab.eval.samples import Setting, generate
    from kvweave_lab.eval.splits import DEV, TRAIN
    from kvweave_lab.eval.tasks import TASKS

    setting = Setting(TRAIN, 0, CONTEXT_TOKENS, CHUNK_TOKENS)
    count, haystack = token_count(adapter), haystack_of(DEV, None)
    return [
        Prompt(sample.question, sample.chunks)
        for task in TASKS
        for sample in generate(task, setting, samples, count, haystack)
    ]


def _table(tuned: "Tuned") -> "Table":
    from rich.table import Table

    from kvweave.cli.output import share

    table = Table(
        "",
        "KL, nats",
        "top 20 % in common (Jaccard)",
        title=f"on {tuned.held_out} prompts held out; trained on {tuned.trained_on}, {tuned.left_out} too long",
        box=None,
        header_style="bold",
    )
    for name, found in (("before", tuned.before), ("after", tuned.after)):
        table.add_row(name, f"{found.kl:.3f}", share(found.jaccard))
    return table
