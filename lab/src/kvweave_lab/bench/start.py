"""`kvweave bench start`: what a command of a fresh process spends before it answers, part by part.

Every process is new, and its files are in the page cache. `python -c "import torch, transformers"` runs in turn with the
commands, in the same rounds. Time is processor time over all threads, which other work on the machine inflates less than
the time on the clock; both are reported.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import KvweaveError
from kvweave.models.loading import model_files
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.measurement import MedianRange
from kvweave_lab.bench.serving.processes import kvweave_server
from kvweave_lab.bench.start_trace import CONTROL, LOADER, PASSES, WEIGHTS

NOT_OURS = (CONTROL, LOADER, WEIGHTS, PASSES)
"""Parts that any program with this model spends."""

_QUESTION = "What is the document about?"
_OTHER_QUESTION = "Who may change it, and when?"
_TRACE = "kvweave_lab.bench.start_trace"
_LIST_MODULES = "import json, sys; json.dump(sorted(sys.modules), open"
_LOADED_CLASSES = ("AutoTokenizer", "AutoModelForCausalLM")
LOADED = "transformers alone, model loaded"
"""The name of a program that loads the model and its tokenizer by transformers' calls."""
SERVED = "kvweave serve, ready"
"""The name of a server that runs until `/health` says that it is ready."""


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What is started, how often.

    Attributes:
        documents: a folder or file to ask about.
        model: as `--model` takes it; None is the shipped reference model.
        new_tokens: longest answer.
        rounds: how often each command runs, in turn.
    """

    documents: Path
    model: str | None
    new_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class StartRow:
    """One command's start.

    Attributes:
        command: its name in the table.
        cpu_s: processor seconds in all.
        wall_s: seconds on the clock.
        own_s: processor seconds beyond `NOT_OURS`: imports, opening, tokenizer and everything else.
        parts: median processor seconds by part.
    """

    command: str
    cpu_s: MedianRange
    wall_s: MedianRange
    own_s: MedianRange
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class StartBench:
    """The control first, then a row for each command."""

    settings: StartSettings
    rows: list[StartRow]


@dataclass(frozen=True, slots=True)
class _Run:
    """One process: processor and clock seconds, and processor seconds by part."""

    cpu_s: float
    wall_s: float
    parts: dict[str, float]

    @property
    def own_s(self) -> float:
        return sum(spent for part, spent in self.parts.items() if part not in NOT_OURS)


def bench_start(settings: StartSettings, folder: Path, progress: Progress = no_progress) -> StartBench:
    """Index the documents in a home below `folder`, ask once, then start every command `rounds` times.

    Raises KvweaveError, with what the command printed, if one fails.
    """
    home = folder / "home"
    model = [] if settings.model is None else ["--model", settings.model]
    home.mkdir()
    source = model_files(settings.model, home)
    loads = "; ".join(
        [CONTROL, *(f"transformers.{name}.from_pretrained({source!r})" for name in _LOADED_CLASSES)]
    )
    others = _modules_of_others(folder, loads)
    traced(["add", str(settings.documents), "--wait", "--quiet", *model], home, others)
    asked = ["ask", "--max-new-tokens", str(settings.new_tokens)]
    commands = {
        "kvweave --help": ["--help"],
        "kvweave ls": ["ls"],
        "kvweave ask, a new question": [*asked, "--fresh", _OTHER_QUESTION],
        "kvweave ask, an answered question": [*asked, _QUESTION],
    }
    for command in commands.values():
        traced(command, home, others)  # the first question of a home stores what the next ones find
    programs = {CONTROL: CONTROL, LOADED: loads}
    runs: dict[str, list[_Run]] = {name: [] for name in (*programs, SERVED, *commands)}
    for number in range(settings.rounds):
        for name, code in programs.items():
            runs[name].append(_process([sys.executable, "-c", code], home))
        runs[SERVED].append(served(folder, home, settings.model))
        for name, command in commands.items():
            runs[name].append(traced(command, home, others))
        progress("starts", number + 1, settings.rounds)
    return StartBench(settings, [_row(name, found) for name, found in runs.items()])


def _row(name: str, runs: Sequence[_Run]) -> StartRow:
    parts = dict.fromkeys(part for run in runs for part in run.parts)
    return StartRow(
        name,
        MedianRange.of(run.cpu_s for run in runs),
        MedianRange.of(run.wall_s for run in runs),
        MedianRange.of(run.own_s for run in runs),
        {part: statistics.median(run.parts.get(part, 0.0) for run in runs) for part in parts},
    )


def _modules_of_others(folder: Path, loads: str) -> Path:
    """Write the modules that the control and then a program that `loads` a model import to a file, and return it."""
    listed = {}
    for part, code in ((CONTROL, CONTROL), (LOADER, loads)):
        output = folder / "modules.json"
        _process([sys.executable, "-c", f"{code}; {_LIST_MODULES}({str(output)!r}, 'w'))"], folder)
        listed[part] = json.loads(output.read_text())
    listed[LOADER] = sorted({*listed[LOADER]}.difference(listed[CONTROL]))
    output.write_text(json.dumps(listed))
    return output


def traced(command: Sequence[str], home: Path, others: Path) -> _Run:
    """Run a command under the tracer; return its output and where its seconds went."""
    output = others.with_name("trace.json")
    run = _process([sys.executable, "-m", _TRACE, str(output), str(others), *command], home)
    return _Run(run.cpu_s, run.wall_s, json.loads(output.read_text())["parts"])


def _process(command: Sequence[str], home: Path) -> _Run:
    """Run a process to its end and return its times, not yet by part."""
    before, began = _children_cpu_s(), time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "KVWEAVE_HOME": str(home)}, capture_output=True, text=True, check=False
    )
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise KvweaveError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return _Run(_children_cpu_s() - before, wall_s, {})


def served(folder: Path, home: Path, model: str | None) -> _Run:
    """Start a server and end it once it is ready. Processor time includes its end, time on the clock does not."""
    before, began = _children_cpu_s(), time.perf_counter()
    with kvweave_server("ready", folder, model=model, flags=["--no-idle-work"], home=home) as server:
        server.start()
        wall_s = time.perf_counter() - began
        server.terminate()
    return _Run(_children_cpu_s() - before, wall_s, {})


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
