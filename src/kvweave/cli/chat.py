"""chat: a conversation about the documents, resumed where it was left."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvweave.cli import options as opt


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "recipe",
    *("top_k", "max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    top_k="Chunks retrieved for each turn. Default: 5.",
    max_new_tokens="Longest answer.",
)
def chat(
    name: Annotated[
        str, typer.Option("--name", help="Conversation name; resumes it if it exists.")
    ] = "default",
    new: Annotated[bool, typer.Option("--new", help="Start over.")] = False,
    *,
    options: opt.SharedOptions,
) -> None:
    """Ask turn by turn, one line each. An empty line or the end of input ends the chat and keeps it."""
    opt.quiet_libraries()
    with options.open_kb() as base, base.conversation(name, new=new) as talk:
        for question in _lines():
            for piece in base.send(talk, question, top_k=options.top_k):
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
