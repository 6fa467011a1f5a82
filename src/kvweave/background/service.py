"""The user service that does background work by itself: systemd on Linux, launchd on macOS, Task Scheduler on Windows.

It starts `kvweave idle --low-load` every quarter of an hour, which ends at once where nothing is to do or the machine is
needed. Only the user's own files are written, and no rights are asked for.
"""

import os
import plistlib
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically

EVERY_MINUTES: Final = 15

_TASK_SCHEMA: Final = "http://schemas.microsoft.com/windows/2004/02/mit/task"

Run = Callable[[Sequence[str]], str]
"""Runs a command; returns what went wrong, empty if nothing did."""


@dataclass(frozen=True, slots=True)
class IdleService:
    """What is written for one knowledge base.

    Attributes:
        files: the content of each file by its path.
        start: the commands that start the service once its files are there.
        stop: the commands that stop it, while its files are still there.
        after: the commands that follow once they are gone.
    """

    files: dict[Path, bytes]
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...] = ()

    @property
    def installed(self) -> bool:
        """Whether its files are there."""
        return all(path.exists() for path in self.files)

    def install(self, run: Run) -> list[str]:
        """Write the files and start the service; return what could not be started, each with its reason.

        Raises OSError if a file cannot be written.
        """
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [content])
        return _failures(self.start, run)

    def uninstall(self, run: Run) -> tuple[list[Path], list[str]]:
        """Stop the service and delete its files; return the files that were there, and what failed."""
        there = [path for path in self.files if path.exists()]
        if not there:
            return [], []
        failed = _failures(self.stop, run)
        for path in there:
            with suppress(FileNotFoundError):
                path.unlink()
        return there, failed + _failures(self.after, run)


def idle_service(
    system: str, kb: str, command: Sequence[str], user_home: Path, home: Path, *, on_battery: bool = False
) -> IdleService:
    """Return the service of a system for a knowledge base.

    Args:
        system: as `sys.platform` says: linux, darwin, win32.
        kb: the knowledge base's name.
        command: the program and its arguments.
        user_home: the user's home folder.
        home: kvweave's own, for what a system has no folder for.
        on_battery: whether it may work on battery.

    Raises:
        InvalidRequest: another system.
    """
    if system == "linux":
        return _systemd(kb, command, user_home)
    if system == "darwin":
        return _launchd(kb, command, user_home, home)
    if system == "win32":
        return _task_scheduler(kb, command, home, on_battery=on_battery)
    raise InvalidRequest(
        f"no user service is known for the system {system!r}; let its scheduler run `kvweave idle --low-load`"
    )


def run_command(command: Sequence[str]) -> str:
    """Run a command; return what went wrong, empty if nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        "" if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    )


def _failures(commands: Sequence[Sequence[str]], run: Run) -> list[str]:
    """Run commands up to the first that fails; return it and those after it, the first with its reason."""
    for number, command in enumerate(commands):
        reason = run(command)
        if reason:
            shown = [subprocess.list2cmdline(each) for each in commands[number:]]
            return [f"{shown[0]}  ({reason})", *shown[1:]]
    return []


def _systemd(kb: str, command: Sequence[str], user_home: Path) -> IdleService:
    name = f"kvweave-idle-{kb}"
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or user_home / ".config") / "systemd" / "user"
    service = f"""[Unit]
Description=Background work of the kvweave knowledge base {kb}
Documentation=man:systemd.service(5)

[Service]
Type=oneshot
ExecStart={" ".join(map(_systemd_quoted, command))}
Nice=19
CPUSchedulingPolicy=batch
IOSchedulingClass=idle
"""
    timer = f"""[Unit]
Description=Start background work of the kvweave knowledge base {kb} every {EVERY_MINUTES} minutes

[Timer]
OnStartupSec={EVERY_MINUTES}min
OnUnitInactiveSec={EVERY_MINUTES}min

[Install]
WantedBy=timers.target
"""
    files = {folder / f"{name}.service": service.encode(), folder / f"{name}.timer": timer.encode()}
    reload = ("systemctl", "--user", "daemon-reload")
    return IdleService(
        files,
        (reload, ("systemctl", "--user", "enable", "--now", f"{name}.timer")),
        (("systemctl", "--user", "disable", "--now", f"{name}.timer"),),
        (reload,),
    )


def _systemd_quoted(word: str) -> str:
    """Return a word of a command line as systemd reads it; see systemd.syntax(7), "Quoting"."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _launchd(kb: str, command: Sequence[str], user_home: Path, home: Path) -> IdleService:
    label = f"kvweave.idle.{kb}"
    path = user_home / "Library" / "LaunchAgents" / f"{label}.plist"
    content = plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": list(command),
            "StartInterval": EVERY_MINUTES * 60,
            "ProcessType": "Background",
            "LowPriorityIO": True,
            "Nice": 19,
            "StandardErrorPath": str(home / f"idle-{kb}.log"),
        }
    )
    domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 501}"
    return IdleService(
        {path: content},
        (("launchctl", "bootstrap", domain, str(path)),),
        (("launchctl", "bootout", f"{domain}/{label}"),),
    )


def _task_scheduler(kb: str, command: Sequence[str], home: Path, *, on_battery: bool) -> IdleService:
    name, path = f"kvweave idle {kb}", home / f"idle-{kb}.xml"
    return IdleService(
        {path: _task(kb, command, on_battery=on_battery)},
        (("schtasks", "/Create", "/TN", name, "/XML", str(path), "/F"),),
        (("schtasks", "/Delete", "/TN", name, "/F"),),
    )


def _task(kb: str, command: Sequence[str], *, on_battery: bool) -> bytes:
    """Return a task in Task Scheduler's XML, in UTF-16 as `schtasks` reads it."""
    battery = str(not on_battery).lower()
    described = {
        "RegistrationInfo": {"Description": f"Background work of the kvweave knowledge base {kb}"},
        "Triggers": {
            "TimeTrigger": {
                "Repetition": {"Interval": f"PT{EVERY_MINUTES}M"},
                "StartBoundary": "2026-01-01T00:00:00",
            }
        },
        "Settings": {
            "MultipleInstancesPolicy": "IgnoreNew",
            "DisallowStartIfOnBatteries": battery,
            "StopIfGoingOnBatteries": battery,
            "StartWhenAvailable": "true",
            "ExecutionTimeLimit": "PT2H",
            "Priority": "8",
        },
        "Actions": {
            "Exec": {"Command": command[0], "Arguments": subprocess.list2cmdline(command[1:])},
        },
    }
    task = ElementTree.Element("Task", version="1.2", xmlns=_TASK_SCHEMA)
    _fill(task, described)
    ElementTree.indent(task)
    text = ElementTree.tostring(task, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-16"?>\r\n{text}\r\n'.encode("utf-16")


def _fill(element: ElementTree.Element, content: "dict[str, object]") -> None:
    for name, value in content.items():
        child = ElementTree.SubElement(element, name)
        if isinstance(value, dict):
            _fill(child, value)
        else:
            child.text = str(value)
