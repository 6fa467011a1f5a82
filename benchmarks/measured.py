"""What has to stand beside every measured number: the command, the commit, the day, the machine."""

import datetime
import platform
import subprocess

import torch


def circumstances(command: str) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": command,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }
