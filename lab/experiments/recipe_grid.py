"""Runs recipes on generated prompts, in several processes.

A folder has a results log for each task and seed, and the definition of every recipe by name. A repeated run computes
only missing outcomes. A name that now means another recipe is refused, since outcomes are stored by name. A definition
consists of the recipe's fields: after a change of the code behind them, use a new name or a new folder.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from kvweave.cli.options import quiet_libraries
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave.state.knowledge_base_state import Progress
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.grid import Case, Suite, budgets, evaluate, generated_cases
from kvweave_lab.eval.outcomes import FULL, REUSE, Outcome, OutcomeLog
from kvweave_lab.eval.preparation import too_long
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.world import Haystack
from kvweave_lab.report import json_bytes
from kvweave_lab.results_log import run_config

T = TypeVar("T")

Variants = Callable[[], Mapping[str, Recipe]]
"""Returns recipes by name. Every process calls it, so it has to be picklable."""

_DEFINITIONS = "definitions.json"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in a recipe; differs between processes
_SET = re.compile(r"(?<=frozenset\(\{)[^{}]+(?=\}\))")
_PRINT_EVERY_S = 30.0  # the progress of a task


@dataclass(frozen=True)
class Grid:
    """Recipes and the prompts to run them on.

    Attributes:
        variants: the recipes; full attention and reuse at ratio 0 always run too.
        suite: tasks, lengths, ratios, seeds and samples. Its recipes and coverages are ignored.
        split: pool of the samples.
        model: as in `load_model`.
        kind: returns the name that replaces a sample's task, None to leave the sample out; a picklable function.
    """

    variants: Variants
    suite: Suite
    split: str
    model: str | None = None
    kind: Callable[[Sample], str | None] | None = None

    def candidates(self) -> list[Candidate]:
        """Return plain reuse, then every variant at every ratio that applies to it.

        Raises InvalidRequest for a variant with the name of a baseline.
        """
        reuse = recipe_named(REUSE)
        candidates = [Candidate(reuse, 0.0)]
        for name, recipe in self.variants().items():
            if name == FULL or (name == REUSE and recipe != reuse):
                raise InvalidRequest(f"a variant is called {name!r}, the name of a baseline; rename it")
            named = replace(recipe, name=name)
            candidates += [Candidate(named, ratio) for ratio in budgets(named, self.suite)[0]]
        return list({candidate.label: candidate for candidate in candidates}.values())

    def pieces(self) -> dict[str, "Grid"]:
        """Return a grid for each task and seed, by the name of its folder."""
        suite = self.suite
        return {
            f"{task}-{seed}" if seed else task: replace(
                self, suite=replace(suite, tasks=(task,), seeds=(seed,))
            )
            for task in dict.fromkeys(suite.tasks)
            for seed in dict.fromkeys(suite.seeds)
        }

    def cases(self, adapter: Adapter) -> list[Case]:
        """Return the prompts that fit into the model's context."""
        haystack = Haystack.of_split(self.split)
        cases = [
            case._replace(sample=replace(case.sample, task=kind))
            for case in generated_cases(self.suite, self.split, haystack, token_count(adapter))
            if (kind := self.kind(case.sample) if self.kind else case.sample.task) is not None
        ]
        left_out = too_long(adapter, [case.sample for case in cases])
        if left_out:
            print(f"left out {len(left_out)} prompts that are too long for the model", file=sys.stderr)
        return [case for case in cases if case.sample.name not in left_out]

    @property
    def prompts(self) -> int:
        """The number of prompts, including those that are left out."""
        suite = self.suite
        return len(suite.tasks) * len(suite.context_tokens) * len(suite.seeds) * suite.samples

    @property
    def answers(self) -> int:
        """The number of outcomes of a first run, full attention's included."""
        return self.prompts * (1 + len(self.candidates()))


def run(grid: Grid, folder: Path, processes: int) -> list[Outcome]:
    """Return all outcomes, task by task, and compute those that the folder lacks.

    Raises InvalidRequest for a name that meant another recipe in an earlier run, and the errors of an evaluation.
    """
    return list(chain.from_iterable(run_pieces(_outcomes, grid, folder, processes)))


def run_pieces(work: Callable[[Grid, Path], T], grid: Grid, folder: Path, processes: int) -> list[T]:
    """Return the results of `work`, a picklable function, for each piece of a grid and the piece's folder.

    A process works on one piece at a time; all processes share the machine's cores.
    """
    record_definitions(folder, [candidate.recipe for candidate in grid.candidates()])
    pieces = grid.pieces()
    folders = [folder / name for name in pieces]
    if processes == 1:
        return [work(*given) for given in zip(pieces.values(), folders, strict=True)]
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        return list(pool.map(work, pieces.values(), folders))


def _outcomes(piece: Grid, folder: Path) -> list[Outcome]:
    adapter = model(piece.model)
    cases = piece.cases(adapter)
    with OutcomeLog(folder, run_config(adapter)) as log:
        runner = Runner(adapter, log)
        return evaluate(cases, len(cases), piece.candidates(), runner, progress_printer(folder.name))


@cache
def model(name: str | None) -> Adapter:
    """Return the model, which is loaded once per process."""
    quiet_libraries()
    return load_model(name)


def progress_printer(name: str) -> Progress:
    """Return a callback that prints progress every half minute and at the end."""
    start = printed = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed > _PRINT_EVERY_S or done == total:
            printed = now
            print(f"{name}: {done} of {total} {stage}, {now - start:.0f} s", file=sys.stderr, flush=True)

    return report


def record_definitions(folder: Path, recipes: Sequence[Recipe]) -> None:
    """Store the definition of every recipe; raises InvalidRequest for a name that has another definition."""
    path = folder / _DEFINITIONS
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = {name: _definition(text) for name, text in stored.items()}
    now = {recipe.name: _definition(repr(recipe)) for recipe in recipes}
    for name in now:
        if before.get(name, now[name]) != now[name]:
            raise InvalidRequest(
                f"{folder} has outcomes of another recipe under the name {name!r}: {before[name]}; give the new one"
                " another name, or name another --output"
            )
    write_atomically(path, [json_bytes(before | now)])


def _definition(text: str) -> str:
    """Return a recipe's text without addresses and the order of sets, which differ between processes."""
    return _SET.sub(lambda match: ", ".join(sorted(match[0].split(", "))), _ADDRESS.sub("", text))
