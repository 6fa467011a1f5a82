"""eval personas: whole systems answer the questions of generated users, or of users in local files, in order of time."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli import options as opt
from kvweave.cli.interrupted import keeps_output
from kvweave.config import Config
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from kvweave_lab.eval.personas.people import User

_USERS, _QUESTIONS, _SEEDS, _FURTHER = 20, 14, 5, 4


@keeps_output
def personas(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            envvar="KVWEAVE_MODEL",
            help="Model that answers: hub id or local folder. Default: the shipped reference model.",
        ),
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    split: Annotated[
        str, typer.Option("--split", help="Pool of phrasings: dev (to try things on) or test (to report).")
    ] = "dev",
    users: Annotated[
        int, typer.Option("--users", min=1, help="Users for each seed, or of each file.")
    ] = _USERS,
    questions: Annotated[
        int, typer.Option("--questions", min=2, help="Questions of a user; of a file's at most.")
    ] = _QUESTIONS,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Seeds 0, 1, …, each with users of its own.")
    ] = _SEEDS,
    further: Annotated[
        int,
        typer.Option(
            "--further", min=0, help="So many users also go through ablations, sweeps and the scheduler."
        ),
    ] = _FURTHER,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="By which kvweave reuses chunk KV here. Default: as in a knowledge base."
        ),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            help="Model shape whose latency is replayed, with random weights; reference: the shipped model, for a first look.",
        ),
    ] = "qwen2.5-0.5b",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each timing.")] = 3,
    enronqa: Annotated[
        list[Path] | None,
        typer.Option("--enronqa", help="EnronQA's jsonl, instead of generated users; repeatable."),
    ] = None,
    mised: Annotated[
        list[Path] | None,
        typer.Option("--mised", help="MISeD's jsonl, instead of generated users; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for JSON and plots; run again, it goes on where it stopped."),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """No cache, published caches, PerCache and kvweave on the same users: latency, hits, quality, operations, bytes."""
    opt.quiet_libraries()
    from kvweave.cli.output import STDOUT, print_json, progress_bar
    from kvweave.models.loading import REFERENCE_NAME, load_model
    from kvweave.models.shapes import random_model
    from kvweave_lab.bench.circumstances import circumstances
    from kvweave_lab.eval.personas.comparison import Request, compare
    from kvweave_lab.eval.personas.report import content, tables, write

    everybody, about = _users(split, users, questions, seeds, enronqa or [], mised or [])
    chosen = recipe or Config(home=Path()).recipe
    request = Request(everybody, about | {"shape": shape}, further, chosen, output, repeats)
    first_look = shape == REFERENCE_NAME
    timed = load_model(None) if first_look else random_model(shape, device=device or "cpu")
    answering = load_model(model, dtype=dtype or "auto", device=device or "auto")
    with progress_bar(quiet or json) as report:
        done = compare(answering, timed, request, report)
    said = asdict(circumstances(shlex.join(["kvweave", *sys.argv[1:]])))
    files = write(output, done, said) if output else []
    if json:
        print_json(content(done, said))
        return
    for table in tables(done):
        STDOUT.print(table)
    for path in files:
        STDOUT.print(f"[dim]{path}[/]", soft_wrap=True)


def _users(
    split: str, users: int, questions: int, seeds: int, enronqa: list[Path], mised: list[Path]
) -> tuple[list["User"], dict[str, Any]]:
    """Who asks, and how to tell people who that is."""
    from kvweave_lab.eval.personas.enronqa import read_enronqa
    from kvweave_lab.eval.personas.mised import read_mised
    from kvweave_lab.eval.personas.people import make_users

    if not (enronqa or mised):
        generated = [user for seed in range(seeds) for user in make_users(split, users, questions, seed)]
        return generated, {"split": split, "seeds": seeds, "questions of a user": questions}
    read = [user for path in enronqa for user in read_enronqa(path, users, questions)]
    read += [user for path in mised for user in read_mised(path, users, questions)]
    if len({user.name for user in read}) < len(read):
        raise InvalidRequest("two of the files hold a user of the same name; give each file once")
    named = [path.name for path in (*enronqa, *mised)]
    return read, {"files": named, "users of a file": users, "questions of a user": questions}
