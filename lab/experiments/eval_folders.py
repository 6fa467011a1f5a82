"""Reads the outcomes in folders that `kvweave eval --output` wrote.

A folder's results log may hold more outcomes than its report counts, such as another split's. Only the outcomes that
`rows.json` counts are read. A folder whose log and report disagree is refused.
"""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import METHODS, uses_auxiliary
from kvweave_lab.eval.outcomes import Outcome, OutcomeKey, read_outcomes
from kvweave_lab.eval.rows import OVERALL

_EQUAL = ("model", "dtype", "device", "split", "chunk_tokens", "version")
"""Facts that have to be equal in all reports before their numbers may share a table."""


@dataclass(frozen=True)
class EvalFolders:
    """The contents of folders of one model and version.

    Attributes:
        names: of the folders, without their parents.
        run_config: of their results logs, which is equal.
        abouts: of their reports.
        outcomes: of all folders; a prompt under a recipe and a budget occurs once.
    """

    names: list[str]
    run_config: dict[str, Any]
    abouts: list[dict[str, Any]]
    outcomes: list[Outcome]

    @property
    def commands(self) -> list[str]:
        """The evaluations, with output folders by name only: their parents mean nothing to others."""
        return [_without_parents(about["command"]) for about in self.abouts]

    @property
    def date(self) -> str:
        """The day of the latest run, ISO 8601."""
        return max(about["date"] for about in self.abouts)

    @property
    def minutes(self) -> float:
        """Minutes to compute all outcomes, over all runs."""
        return sum(outcome.took_s for outcome in self.outcomes) / 60


def read_folders(folders: Sequence[Path]) -> EvalFolders:
    """Return the contents of all folders.

    Auxiliary models may differ if no recipe uses one. Raises InvalidRequest for a folder without a finished evaluation
    and for folders that must not be mixed.
    """
    configs, abouts, outcomes = zip(*map(_read, folders), strict=True)
    if not any(_uses_auxiliary(outcome) for part in outcomes for outcome in part):
        configs = tuple({**config, "auxiliary": None} for config in configs)
    for folder, config, about in zip(folders, configs, abouts, strict=True):
        compared = [(configs[0], config, [*configs[0], *config]), (abouts[0], about, _EQUAL)]
        differing = {
            name for one, other, names in compared for name in names if one.get(name) != other.get(name)
        }
        if differing:
            raise InvalidRequest(
                f"{folder} and {folders[0]} differ in {', '.join(sorted(differing))}; gather folders of one evaluation"
            )
    names = [folder.resolve().name for folder in folders]
    return EvalFolders(names, configs[0], list(abouts), _merge(folders, outcomes))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Outcome]]:
    config, logged = read_outcomes(folder)
    try:
        report = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{folder} has no rows.json; let the evaluation finish") from error
    reported = {_cell(row): row["samples"] for row in report["rows"] if row["task"] != OVERALL}
    outcomes = [outcome for outcome in logged if _cell_of(outcome) in reported]
    if Counter(map(_cell_of, outcomes)) != reported:
        raise InvalidRequest(
            f"{folder} holds outcomes of other prompts than its rows.json counts; repeat the command if it was"
            " interrupted, and use a separate folder for every split and number of samples"
        )
    return config, report["about"], outcomes


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["context_tokens"], row["recipe"], row["ratio"], row.get("coverage")


def _cell_of(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.task, outcome.context_tokens, *outcome.label


def _uses_auxiliary(outcome: Outcome) -> bool:
    method = outcome.recipe.rpartition("+")[2]
    return method in METHODS and uses_auxiliary(method)


def _merge(folders: Sequence[Path], parts: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Return each outcome once: full attention and reuse are in every folder. Raises InvalidRequest if two differ."""
    found: dict[OutcomeKey, Outcome] = {}
    for folder, outcomes in zip(folders, parts, strict=True):
        for outcome in outcomes:
            first = found.setdefault((outcome.sample, outcome.label), outcome)
            if (first.answer, first.score) != (outcome.answer, outcome.score):
                raise InvalidRequest(
                    f"{folder} has another answer to {outcome.sample} under {outcome.recipe} than an earlier folder;"
                    " evaluate both again"
                )
    return list(found.values())


def _without_parents(command: str) -> str:
    words = shlex.split(command)
    for place, word in enumerate(words):
        if word.startswith("--output="):
            words[place] = f"--output={Path(word.removeprefix('--output=')).name}"
        elif place and words[place - 1] == "--output":
            words[place] = Path(word).name
    return shlex.join(words)
