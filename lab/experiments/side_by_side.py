"""Recipes over generated prompts, task by task in several processes; every outcome is kept as it comes.

A folder has a journal for each task and seed, and the definition of every recipe that ran under each name. Run again, only what
is missing is computed; a name that now means another recipe is refused, since outcomes are kept by name. Definitions are
the recipes' own fields: a change of the code behind them is not noticed and needs a new name, or a new folder.
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
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.fitting import too_long
from kvweave_lab.eval.grid import Case, Progress, budgets, evaluate, generated_cases
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.journal import Journal
from kvweave_lab.eval.results import FULL, REUSE, Outcome
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.subject import subject_of
from kvweave_lab.eval.suites import Suite

T = TypeVar("T")

Variants = Callable[[], Mapping[str, Recipe]]
"""Makes named recipes. Called anew in every process, so it has to be something that can be pickled."""

_DEFINITIONS = "definitions.json"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in a recipe: another one in every process
_SET = re.compile(r"(?<=frozenset\(\{)[^{}]+(?=\}\))")
_TELL_S = 30.0  # between two lines about a task's progress


@dataclass(frozen=True)
class Grid:
    """What runs.

    Attributes:
        variants: the recipes; full attention and reuse at ratio 0 always run beside them.
        suite: tasks, lengths, ratios, seeds and prompts of each. Its recipes and coverages do not count.
        split: pool of the samples.
        model: as `load_model` takes it.
        kind: what a sample counts as instead of its task, None to leave it out; no more than can be pickled.
    """

    variants: Variants
    suite: Suite
    split: str
    model: str | None = None
    kind: Callable[[Sample], str | None] | None = None

    def candidates(self) -> list[Candidate]:
        """Every variant under its name at every ratio that means something to it, behind plain reuse.

        Raises InvalidRequest for a variant that takes the name of what all are compared with.
        """
        reuse = recipe_named(REUSE)
        found = [Candidate(reuse, 0.0)]
        for name, recipe in self.variants().items():
            if name == FULL or (name == REUSE and recipe != reuse):
                raise InvalidRequest(f"a variant is called {name!r}, which all are compared with; rename it")
            named = replace(recipe, name=name)
            found += [Candidate(named, ratio) for ratio in budgets(named, self.suite)[0]]
        return list({candidate.label: candidate for candidate in found}.values())

    def pieces(self) -> dict[str, "Grid"]:
        """The grid cut into one task and one seed each, by the name of their folder."""
        suite = self.suite
        return {
            f"{task}-{seed}" if seed else task: replace(
                self, suite=replace(suite, tasks=(task,), seeds=(seed,))
            )
            for task in dict.fromkeys(suite.tasks)
            for seed in dict.fromkeys(suite.seeds)
        }

    def cases(self, adapter: Adapter) -> list[Case]:
        """The prompts that the model has room for."""
        haystack = Haystack.of_split(self.split)
        made = [
            case._replace(sample=replace(case.sample, task=kind))
            for case in generated_cases(self.suite, self.split, haystack, token_count(adapter))
            if (kind := self.kind(case.sample) if self.kind else case.sample.task) is not None
        ]
        left_out = too_long(adapter, [case.sample for case in made])
        if left_out:
            print(f"{len(left_out)} prompts have no room in the model and are left out", file=sys.stderr)
        return [case for case in made if case.sample.name not in left_out]

    @property
    def prompts(self) -> int:
        """At most: those that are left out are among them."""
        suite = self.suite
        return len(suite.tasks) * len(suite.context_tokens) * len(suite.seeds) * suite.samples

    @property
    def answers(self) -> int:
        """How many it takes where no journal has any, full attention's among them."""
        return self.prompts * (1 + len(self.candidates()))


def run(grid: Grid, folder: Path, processes: int) -> list[Outcome]:
    """All outcomes, task by task; what the folder holds already is not computed again.

    Raises InvalidRequest for a name that stands for another recipe than before, and whatever an evaluation raises.
    """
    return list(chain.from_iterable(each_piece(_answered, grid, folder, processes)))


def each_piece(work: Callable[[Grid, Path], T], grid: Grid, folder: Path, processes: int) -> list[T]:
    """What `work`, a function that can be pickled, returns for each piece of a grid and that piece's own folder.

    A process takes one piece at a time; together they use the machine's cores.
    """
    settle(folder, [candidate.recipe for candidate in grid.candidates()])
    pieces = grid.pieces()
    folders = [folder / name for name in pieces]
    if processes == 1:
        return [work(*given) for given in zip(pieces.values(), folders, strict=True)]
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        return list(pool.map(work, pieces.values(), folders))


def _answered(piece: Grid, folder: Path) -> list[Outcome]:
    adapter = model(piece.model)
    cases = piece.cases(adapter)
    with Journal(folder, subject_of(adapter)) as journal:
        runner = Runner(adapter, journal)
        return evaluate(cases, len(cases), piece.candidates(), runner, teller(folder.name))


@cache
def model(name: str | None) -> Adapter:
    """Loaded once per process."""
    quiet_libraries()
    return load_model(name)


def teller(what: str) -> Progress:
    """Says how far it is, not more than every half a minute."""
    began = told = time.monotonic()

    def tell(stage: str, done: int, of: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > _TELL_S or done == of:
            told = now
            print(f"{what}: {done} of {of} {stage}, {now - began:.0f} s", file=sys.stderr, flush=True)

    return tell


def settle(folder: Path, recipes: Sequence[Recipe]) -> None:
    """Write down what every name stands for; raises InvalidRequest for one that stood for another recipe before."""
    path = folder / _DEFINITIONS
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = {name: _definition(text) for name, text in kept.items()}
    now = {recipe.name: _definition(repr(recipe)) for recipe in recipes}
    for name in now:
        if before.get(name, now[name]) != now[name]:
            raise InvalidRequest(
                f"{folder} has outcomes of another recipe under the name {name!r}: {before[name]}; give the new one a"
                " name of its own, or name another --output"
            )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(before | now, indent=1, ensure_ascii=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def _definition(text: str) -> str:
    """A recipe's text without what differs from process to process: addresses, and the order of sets."""
    return _SET.sub(lambda found: ", ".join(sorted(found[0].split(", "))), _ADDRESS.sub("", text))
