"""The `kvweave` command: gathers the command groups and turns every expected error into one line."""

import logging
import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from kvweave import __version__
from kvweave.cli import ask, background, cache, chat, demo, doctor, documents
from kvweave.cli.command_group import PluginGroup
from kvweave.cli.interrupted import interrupt_behind, message
from kvweave.errors import KvweaveError

INTERRUPTED = 130

app = typer.Typer(
    name="kvweave",
    cls=PluginGroup,
    help="Answers over your own documents that never compute the same thing twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("add")(documents.add)
app.command("ask")(ask.ask)
app.command("chat")(chat.chat)
app.command("ls")(documents.ls)
app.command("rm")(documents.rm)
app.command("idle")(background.idle)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvweave {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Answers over your own documents that never compute the same thing twice."""


def main() -> None:
    """Run the command line; exit code 1 for an expected error, 2 for wrong usage, 130 when interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # how Typer ends on Ctrl-C
            console.print(message(interrupt_behind(stop)))
        raise
    except Exception as error:
        if interrupt := interrupt_behind(error):
            console.print(message(interrupt))
            sys.exit(INTERRUPTED)
        if not isinstance(error, KvweaveError | OSError):
            raise
        console.print(f"[red bold]error:[/] {escape(str(error))}")
        sys.exit(1)
