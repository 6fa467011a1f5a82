"""The `kvweave` command: finds the command that was named and turns every expected error into one line."""

import logging
import os
import sys

import typer

from kvweave import __version__
from kvweave.cli.command_group import LazyGroup
from kvweave.cli.interrupted import interrupt_behind, message
from kvweave.errors import InvalidRequest, KvweaveError

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
        from kvweave.cli.overview import print_overview

        print_overview()


def main() -> None:
    """Run the command line; exit code 1 for an expected error, 2 for wrong usage, 130 when interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
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
        if isinstance(error, RuntimeError) and "home directory" in str(error):  # of pathlib, in some library
            error = InvalidRequest(
                "no home folder of this user is known; set HOME, and name --home or KVWEAVE_HOME"
            )
        if not isinstance(error, KvweaveError | OSError):
            raise
        _print(f"{typer.style('error:', fg='red', bold=True)} {error}")
        sys.exit(1)


def _print(line: str) -> None:
    typer.echo(line, err=True)
