"""idle --install and --uninstall: write the user service that starts background work, and take it away."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvweave.cli import options as opt
from kvweave.cli.output import STDERR, STDOUT
from kvweave.engine.background.service import (
    EVERY_MINUTES,
    IdleService,
    idle_service,
    run_command,
)
from kvweave.errors import InvalidRequest


def service_of(options: opt.SharedOptions, names: Sequence[str]) -> IdleService | None:
    """Return the service of this system for a command with the options `names`; None if none is known for the system."""
    config = options.config()
    command = [sys.executable, "-m", "kvweave", "idle", "--low-load", "--quiet"]
    command += ["--home", str(config.home), "--kb", options.kb]
    command += opt.arguments_of(options, [name for name in names if name not in opt.KB])
    on_battery = config.idle.idle_power == "any"
    try:
        return idle_service(
            sys.platform, options.kb, command, Path.home(), config.home, on_battery=on_battery
        )
    except InvalidRequest:
        if names:
            raise
        return None


def install(options: opt.SharedOptions, names: Sequence[str], print_only: bool) -> None:
    """Write the service and start it; with `print_only` show what would be written."""
    with options.open_kb():  # refuses one that is not there
        service = service_of(options, names)
    assert service is not None
    if print_only:
        for path, content in service.files.items():
            text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
            print(f"# {path}\n{text}")
        return
    failed = service.install(run_command)
    for path in service.files:
        STDOUT.print(f"wrote {path}", soft_wrap=True, highlight=False)
    if failed:
        _tell("it could not be started; run:", failed)
    else:
        STDOUT.print(
            f"background work starts every {EVERY_MINUTES} minutes at low load; kvweave idle --status shows it"
        )
    STDOUT.print(f"undo: kvweave idle --uninstall{_kb(options)}", soft_wrap=True)


def uninstall(options: opt.SharedOptions) -> None:
    """Stop the service and delete its files."""
    service = service_of(options, ())
    removed, failed = ([], []) if service is None else service.uninstall(run_command)
    for path in removed:
        STDOUT.print(f"deleted {path}", soft_wrap=True, highlight=False)
    if failed:
        _tell("the system did not take it away; run:", failed)
    if not removed:
        STDOUT.print(f"no service is installed for {options.kb}")


def _tell(what: str, commands: Sequence[str]) -> None:
    STDERR.print(what)
    for command in commands:
        STDERR.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)


def _kb(options: opt.SharedOptions) -> str:
    return "" if options.kb == "default" else f" --kb {options.kb}"
