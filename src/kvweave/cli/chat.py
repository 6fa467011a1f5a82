"""chat: a conversation about the documents, which a later run resumes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import echo
from kvweave.errors import ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from kvweave.server.choice import ServerChoice


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "recipe",
    *("top_k", "max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    "use_server",
    top_k="Chunks retrieved for each turn. Default: 5.",
    max_new_tokens="Longest answer.",
)
def chat(
    name: Annotated[
        str, typer.Option("--name", help="Conversation name; resumes it if it exists.")
    ] = "default",
    new: Annotated[bool, typer.Option("--new", help="Start over.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say whether a running server answers, and why if not.")
    ] = False,
    *,
    options: opt.SharedOptions,
) -> None:
    """Ask turn by turn, one line each. An empty line or the end of input ends the chat and keeps it."""
    from kvweave.server.choice import choose_server

    with ExitStack() as stack:
        # The server decodes conversations with its own settings; a request carries only top_k.
        server, printed = choose_server(options.config(), ("top_k",)), ""
        talk = _Talk(options, name, server, stack, new=new)
        for question in _lines():
            for piece in talk.send(question):
                echo(piece, end="")
            echo()
            who = server.line or "answered by this process"
            if explain and who != printed:
                printed = who
                echo(who, err=True)  # a pipe may read the answers from standard output


class _Talk:
    """A conversation in the running server, or in this process if no server runs or it stops responding.

    Both store the conversation in the same files after every turn, so either can continue it. Closing `stack` closes it.
    """

    def __init__(
        self, options: opt.SharedOptions, name: str, server: "ServerChoice", stack: ExitStack, *, new: bool
    ) -> None:
        self._options, self._name, self._server, self._stack = options, name, server, stack
        self._here: Callable[[str], Iterator[str]] | None = None
        if server.client is not None and new:
            try:
                server.client.start_over(options.kb, name)
            except (ServerUnavailable, ServerRefused) as error:
                server.give_up(error)
        if server.client is None:
            self._open(new=new)

    def send(self, question: str) -> Iterator[str]:
        client, begun = self._server.client, False
        if client is not None:
            top_k = self._options.top_k
            if top_k is None:
                top_k = self._server.options.get("top_k")
            try:
                for piece in client.send(self._options.kb, self._name, question, top_k):
                    begun = True
                    yield piece
                return
            except (ServerUnavailable, ServerRefused) as error:
                if begun:
                    raise ServerUnavailable(
                        f"{error}; the turns before this one are kept: run chat again"
                    ) from error
                self._server.give_up(error)
                self._open(new=False)
        assert self._here is not None
        yield from self._here(question)

    def _open(self, *, new: bool) -> None:
        base = self._stack.enter_context(self._options.open_kb())
        talk = self._stack.enter_context(base.conversation(self._name, new=new))
        self._here = lambda question: base.send(talk, question, top_k=self._options.top_k)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input up to an empty one."""
    while True:
        if sys.stdin.isatty():
            echo("> ", end="")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
