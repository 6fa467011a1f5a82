"""What has to stand beside every measured number: the command, the code, the day, the machine."""

import datetime
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import kvweave


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Where and how figures came about.

    Attributes:
        command: repeats the measurement when pasted into a shell.
        version: of kvweave.
        commit: of the checkout that ran; empty for an installed package.
        date: ISO 8601.
        machine: processor architecture, the widest vector instructions that torch uses, and matrix units if there are any.
        threads: that torch computes with.
    """

    command: str
    version: str
    commit: str
    date: str
    machine: str
    threads: int


def circumstances(command: str) -> AnswerSettings:
    """As they are now."""
    return AnswerSettings(
        command=command,
        version=kvweave.__version__,
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        machine=_machine(),
        threads=torch.get_num_threads(),
    )


def _machine() -> str:
    units = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*units, "AMX"] if torch.cpu._is_amx_tile_supported() else units)


def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=9"]
    told = subprocess.run(asked, capture_output=True, text=True)
    return told.stdout.strip() if told.returncode == 0 else ""
