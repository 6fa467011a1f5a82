"""The `kvweave` command: loads the named command, from kvweave or a plugin, and prints every expected error as one line."""

import io
import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from kvweave.cli.terminal import harmless, interrupt_behind, message, prints_unicode
from kvweave.errors import InvalidRequest, KvweaveError
from kvweave.plugins import more_in_lab, plugins
from kvweave.version import __version__

GROUP = "kvweave.commands"

OWN: Final[Mapping[str, tuple[str, str]]] = {
    "add": ("documents:add", "Index files and folders."),
    "ask": ("ask:ask", "Answer a question from the documents, with sources."),
    "search": ("ask:search", "Show the passages for a question, with scores and why."),
    "chat": ("chat:chat", "Ask turn by turn, in a conversation that is kept."),
    "serve": ("serve:serve", "Answer over HTTP, with OpenAI's API and a page."),
    "ls": ("documents:ls", "List the documents."),
    "rm": ("documents:rm", "Remove documents and what was stored for them."),
    "idle": ("background:idle", "Predict questions and prepare their answers."),
    "calibrate": ("background:calibrate", "Find the cheapest recipe that is good enough."),
    "cache": ("cache:app", "Show, verify, limit or clear what is stored."),
    "prepare": ("preparation:prepare", "Prepare chunks of your own retriever ahead of requests."),
    "mcp": ("serve:mcp", "Serve the knowledge bases to agents over MCP."),
    "doctor": ("doctor:doctor", "Check the machine, the model and the store."),
    "demo": ("demo:demo", "Try it on sample documents, beside full prefill."),
}
"""kvweave's own commands in the order of `--help`: module and function below `kvweave.cli`, and the summary."""


class LazyGroup(TyperGroup):
    """A command group that imports a command when it is used. `--help` imports only those of plugins."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return kvweave's own commands, then those of plugins by name."""
        return [*OWN, *sorted(name for name in plugins(GROUP) if name not in OWN)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None."""
        if cmd_name in OWN:
            if self._listing:
                return TyperCommand(cmd_name, help=OWN[cmd_name][1])
            module, _, attribute = OWN[cmd_name][0].partition(":")
            return _command(cmd_name, getattr(import_module(f"kvweave.cli.{module}"), attribute))
        plugin = plugins(GROUP).get(cmd_name)
        return None if plugin is None else _command(cmd_name, plugin.load())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as the base class does; the error for an unknown one says how to install kvweave-lab's commands."""
        known = ctx.resilient_parsing or args[0].startswith("-") or args[0] in self.list_commands(ctx)
        if not known:
            ctx.fail(f"No such command {args[0]!r}{more_in_lab(GROUP)}.")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help without importing kvweave's own commands."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _command(name: str, target: Any) -> Any:
    """Return a Typer app or a function as a command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name)
        return typer.main.get_group(app).get_command(None, name)  # type: ignore[arg-type]
    app.command()(target)
    command = typer.main.get_command(app)
    command.name = name
    return command


INTERRUPTED = 130

app = typer.Typer(
    name="kvweave",
    cls=LazyGroup,
    help="Answers over your own documents that never compute the same thing twice.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich and its markdown take longer to import than all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvweave {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Answers over your own documents that never compute the same thing twice."""
    if context.invoked_subcommand is None:
        _print_overview()


_COMMANDS = (
    ("kvweave add FOLDER", "read documents and prepare them"),
    ("kvweave ask 'QUESTION'", "answer from them, with sources"),
    ("kvweave serve", "the same as a page and with OpenAI's API"),
)


def _print_overview() -> None:
    """Print the main commands and the knowledge bases of the default home."""
    from kvweave.config import default_home

    home = default_home().absolute()
    print(
        f"kvweave {__version__}: answers over your own documents that never compute the same thing twice.\n"
    )
    for command, what in _COMMANDS:
        print(f"  {command:<24}{what}")
    print()
    listed = [(path.parent.name, _counts(path)) for path in sorted(home.glob("kb/*/catalog.sqlite"))]
    if not listed:
        print(f"Nothing is in {home} yet. `kvweave demo` tries it on sample documents.")
    else:
        print(f"In {home}:")
        for name, counts in listed:
            print(f"  {name:<24}{counts}{'' if name == 'default' else f'  (--kb {name})'}")
    print("\n`kvweave --help` lists every command.")


def _counts(path: Path) -> str:
    """Return the number of documents and chunks of a knowledge base, read without locks and without model libraries."""
    import sqlite3
    from contextlib import closing
    from urllib.parse import quote

    why: sqlite3.Error | None = None
    # In a read-only folder SQLite cannot create its shared memory.
    for mode in ("mode=ro", "immutable=1"):
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=1)) as found:
                ((documents, chunks),) = found.execute(
                    "SELECT count(*), coalesce(sum(chunks), 0) FROM documents"
                )
        except sqlite3.Error as error:
            why = error
        else:
            return f"{documents} document{'' if documents == 1 else 's'}, {chunks} chunk{'' if chunks == 1 else 's'}"
    return f"cannot be read: {why}"


def main() -> None:
    """Run the command line. The exit code is 1 for an expected error, 2 for wrong usage and 130 on Ctrl-C."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (
        "OMP_WAIT_POLICY" not in os.environ
    ):  # before PyTorch is imported, whose OpenMP reads it once; see `machine.py`
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper) and not prints_unicode():
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # how Typer ends on Ctrl-C
            _print(message(interrupt_behind(stop)))
        raise
    except Exception as error:
        if interrupt := interrupt_behind(error):
            _print(message(interrupt))
            sys.exit(INTERRUPTED)
        if isinstance(error, RuntimeError) and "home directory" in str(
            error
        ):  # raised by pathlib in some library
            error = InvalidRequest(
                "this user has no home folder; set HOME, and give --home or set KVWEAVE_HOME"
            )
        if not isinstance(error, KvweaveError | OSError):
            raise
        _print(f"{typer.style('error:', fg='red', bold=True)} {harmless(str(error))}")
        sys.exit(1)


class _Formatter(logging.Formatter):
    """Prints symbols in place of control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _print(line: str) -> None:
    typer.echo(line, err=True)
