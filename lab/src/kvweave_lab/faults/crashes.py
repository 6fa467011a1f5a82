"""A workload that is recorded once, and then checked as if its processes had died, or the power had failed, after any call."""

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from kvweave_lab.faults import shim
from kvweave_lab.faults.checks import Checker, broken_in, must
from kvweave_lab.faults.disk import CHANGES, SYNCS, Disk, Kind, Loss, Record, read_records
from kvweave_lab.faults.homes import open_home
from kvweave_lab.faults.workload import Step, Truth, take

_PATIENCE_S = 1200
_SAME_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of a recording: after how many records, and what was true then."""

    record: int
    truth: Truth


def run(root: Path, steps: Sequence[Step], process: int = 0) -> None:
    """Take the steps, and mark in the recording when each begins and is acknowledged."""
    base = open_home(root / "home")
    for number, step in enumerate(steps):
        shim.mark(f"begin {process} {number}")
        if step.kind == "reopen":
            base.close()
            base = open_home(root / "home")
        else:
            take(base, root, step)
        shim.mark(f"done {process} {number}")
    base.close()


def in_fork(work: Callable[[], None]) -> int:
    """Start `work` in a fork; return its id. The fork ends with code 1 and a traceback if it raises."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(_PATIENCE_S)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def record(root: Path, plans: Sequence[Sequence[Step]]) -> tuple[Disk, list[Record]]:
    """Run one process for each plan, all at once, on an empty home at `root`; return the disk before, and what they did.

    Raises Broken if a process failed, or changed a file without being seen.
    """
    shutil.rmtree(root, ignore_errors=True)
    (root / "documents").mkdir(parents=True)
    before, replayed, log = Disk(root), Disk(root), root.with_name("log")
    log.unlink(missing_ok=True)
    with shim.recording(root, log):
        children = [in_fork(partial(run, root, steps, number)) for number, steps in enumerate(plans)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    must(not any(codes), "a step without faults succeeds", codes)
    records = read_records(log)
    for each in records:
        replayed.apply(each)
    unseen = replayed.differences(root)
    must(not unseen, "the recording saw every write", unseen[:3])
    return before, records


def points(records: Sequence[Record], plans: Sequence[Sequence[Step]]) -> Iterator[Point]:
    """Yield what is true after each record."""
    truth, running = Truth(), dict[str, Step]()
    for number, each in enumerate(records, 1):
        if each.kind is Kind.MARK:
            word, process, step = each.path.split()
            if word == "begin":
                running[process] = plans[int(process)][int(step)]
            else:
                truth = truth.after(running.pop(process))
        now = truth
        for under_way in running.values():
            now = now.during(under_way)
        yield Point(number, now)


def can_differ(record: Record, loss: Loss) -> bool:
    """Return whether a crash after this record leaves something else than one before it."""
    if loss is Loss.NOTHING:
        return record.kind in CHANGES
    return record.kind in (SYNCS if loss is Loss.UNSYNCED else CHANGES | SYNCS) or record.kind is Kind.MARK


def check_all(
    root: Path,
    plans: Sequence[Sequence[Step]],
    random: Random,
    chosen: Callable[[Loss], float],
    thorough: float,
    report: Callable[[str, str, str], None],
) -> None:
    """Record the plans, then check what crashes leave at `root`, each possible one with the chance `chosen` gives its loss.

    A check is thorough with the chance `thorough`. `report` gets for each the loss, the broken invariant (empty if all hold),
    and where and how it broke.
    """
    disk, records = record(root, plans)

    def check() -> None:
        checker, boot = Checker(root), root.with_name("boot")
        for point, last in zip(points(records, plans), records, strict=True):
            disk.apply(last)
            for loss in Loss:
                if can_differ(last, loss) and random.random() < chosen(loss):
                    disk.leave(root, loss, random)
                    boot.write_text(f"after {point.record}")
                    shim.restart_machine(_SAME_BOOT if loss is Loss.NOTHING else boot)
                    broken, detail = broken_in(
                        partial(checker.check, point.truth, thorough=random.random() < thorough)
                    )
                    where = f"record {point.record} ({last.kind.name} {last.path.removeprefix(str(root))})"
                    report(loss, broken, f"{where}: {detail}" if broken else "")

    with shim.recording(root, Path(os.devnull)):  # for the clock
        must(not os.waitpid(in_fork(check), 0)[1], "the check ends")
