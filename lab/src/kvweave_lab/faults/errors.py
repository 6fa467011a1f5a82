"""Calls that fail in the middle of a workload: a full disk, errors of reading and writing, missing permissions, a clock that jumps."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from kvweave.errors import KvweaveError
from kvweave_lab.faults import shim
from kvweave_lab.faults.checks import Checker, broken_in, must
from kvweave_lab.faults.crashes import in_fork
from kvweave_lab.faults.disk import Kind
from kvweave_lab.faults.homes import open_home
from kvweave_lab.faults.workload import Truth, draw, take

_NEW: Final = (Kind.CREATE, Kind.WRITE, Kind.MKDIR)
FAULTS: Final[dict[str, tuple[tuple[Kind, ...], int, bool]]] = {
    "disk full": (_NEW, errno.ENOSPC, True),
    "disk full once": (_NEW, errno.ENOSPC, False),
    "write error": ((Kind.WRITE, Kind.SYNC, Kind.SYNC_FOLDER), errno.EIO, False),
    "read error": ((Kind.READ,), errno.EIO, False),
    "file not opened": ((Kind.OPEN,), errno.EIO, False),
    "no permission": ((Kind.OPEN, *_NEW, Kind.RENAME, Kind.UNLINK), errno.EACCES, True),
    "name not changed": ((Kind.RENAME, Kind.LINK, Kind.UNLINK), errno.EIO, False),
}
"""The calls that fail, how, and whether they fail from then on until the step is over, or once."""
CLOCK: Final = "clock jumped"
_NONE: Final = "too few calls for a fault"
_THOROUGH: Final = 0.3
_DAY_S: Final = 86_400.0
_JUMPS_S: Final = (-400 * _DAY_S, -_DAY_S, -30.0, 90.0, _DAY_S, 400 * _DAY_S)


def check_all(root: Path, steps: int, random: Random, report: Callable[[str, str, str], None]) -> None:
    """Run a drawn workload at `root` in which most steps meet a fault, and check the home after each.

    A step may fail, with an error that is meant for users. `report` is as for `crashes.check_all`.
    """
    shutil.rmtree(root, ignore_errors=True)
    (root / "documents").mkdir(parents=True)

    def work() -> None:
        checker, truth, base = Checker(root), Truth(), open_home(root / "home")
        for step in draw(random, steps):
            fault = random.choice([*FAULTS, CLOCK])
            call = int(2 ** random.uniform(0, 8)) - 1
            if fault == CLOCK:
                shim.set_clock(random.choice(_JUMPS_S))
            else:
                kinds, error, lasting = FAULTS[fault]
                shim.fail(kinds, call, shim.FOREVER if lasting else call, error=error)
            failed = ""
            try:
                if step.kind == "reopen":
                    base.close()
                    base = open_home(root / "home")
                else:
                    take(base, root, step)
                truth = truth.after(step)
            except (KvweaveError, OSError) as expected:
                truth, failed = truth.during(step), str(expected)
            except Exception as unexpected:
                truth, failed = truth.during(step), repr(unexpected)
                report(fault, "an error is one for users", f"{step} at call {call}: {failed}")
            if fault != CLOCK and shim.calls() <= call:
                fault = _NONE
            shim.fail((), 0)
            broken, detail = broken_in(partial(checker.check, truth, thorough=random.random() < _THOROUGH))
            report(fault, broken, f"{step} at call {call}, which gave {failed!r}: {detail}" if broken else "")
            shim.set_clock(0)

    with shim.recording(root, Path(os.devnull)):
        code = os.waitpid(in_fork(work), 0)[1]
    must(not code, "a process with faults ends", code)
