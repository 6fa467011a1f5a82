"""chat: a conversation about the documents, resumed where it was left."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvweave.cli import options as opt


def chat(
    name: Annotated[
        str, typer.Option("--name", help="Conversation name; resumes it if it exists.")
    ] = "default",
    new: Annotated[bool, typer.Option("--new", help="Start over.")] = False,
    home: opt.Home = None,
    kb: opt.Kb = "default",
    model: opt.Model = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    recipe: opt.Recipe = None,
    top_k: Annotated[
        int | None, typer.Option(envvar="KVWEAVE_TOP_K", help="Chunks retrieved for each turn. Default: 5.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(envvar="KVWEAVE_MAX_NEW_TOKENS", help="Longest answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(envvar="KVWEAVE_TEMPERATURE", help="0 is greedy.")
    ] = None,
    kv_budget: opt.KvBudget = None,
    resident_bytes: opt.ResidentBytes = None,
) -> None:
    """Ask turn by turn, one line each. An empty line or the end of input ends the chat and keeps it."""
    opt.quiet_libraries()
    with (
        opt.open_kb(
            kb,
            home,
            model=model,
            dtype=dtype,
            device=device,
            recipe=recipe,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            kv_budget=kv_budget,
            resident_bytes=None if resident_bytes is None else opt.size_bytes(resident_bytes),
        ) as base,
        base.conversation(name, new=new) as talk,
    ):
        for question in _lines():
            for piece in base.send(talk, question, top_k=top_k):
                typer.echo(piece, nl=False)
            typer.echo()


def _lines() -> Iterator[str]:
    """Yield the lines typed or piped in, up to an empty one."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
