"""What `kvweave eval --output` left in folders, read back: the outcomes that their reports are made of.

A folder's journal may hold more than its report says, such as another split's prompts. Only what `rows.json` counts is
taken, and a folder in which the two do not fit together is refused.
"""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import WITH_AUXILIARY
from kvweave_lab.eval.journal import Key, read_journal
from kvweave_lab.eval.results import Outcome
from kvweave_lab.eval.summary import OVERALL

_THE_SAME = ("model", "dtype", "device", "split", "chunk_tokens", "version")
"""What reports have to say alike before their figures may stand in one table."""


@dataclass(frozen=True)
class Evaluated:
    """Folders of one model and version.

    `names` are the folders' own, without where they lie. `subject` is what their journals say alike, `abouts` what each
    report says of itself; `outcomes` are those of all folders, each prompt under a recipe and a budget once.
    """

    names: list[str]
    subject: dict[str, Any]
    abouts: list[dict[str, Any]]
    outcomes: list[Outcome]

    @property
    def commands(self) -> list[str]:
        """What was run, output folders by their own names only: where they lie means nothing to others."""
        return [_without_place(about["command"]) for about in self.abouts]

    @property
    def date(self) -> str:
        """The day of the latest run, ISO 8601."""
        return max(about["date"] for about in self.abouts)

    @property
    def minutes(self) -> float:
        """What the outcomes took, in all runs that they came from."""
        return sum(outcome.took_s for outcome in self.outcomes) / 60


def read(folders: Sequence[Path]) -> Evaluated:
    """All folders together.

    Auxiliary models may differ where no recipe read with one. Raises InvalidRequest for a folder that is not a finished
    evaluation's, and for folders that must not be mixed.
    """
    subjects, abouts, outcomes = zip(*map(_read, folders), strict=True)
    if not any(_method(outcome) in WITH_AUXILIARY for part in outcomes for outcome in part):
        subjects = tuple({**subject, "auxiliary": None} for subject in subjects)
    for folder, subject, about in zip(folders, subjects, abouts, strict=True):
        said = [(subjects[0], subject, [*subjects[0], *subject]), (abouts[0], about, _THE_SAME)]
        differing = {name for one, other, names in said for name in names if one.get(name) != other.get(name)}
        if differing:
            raise InvalidRequest(
                f"{folder} and {folders[0]} differ in {', '.join(sorted(differing))}; gather folders of one evaluation"
            )
    names = [folder.resolve().name for folder in folders]
    return Evaluated(names, subjects[0], list(abouts), _together(folders, outcomes))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Outcome]]:
    subject, held = read_journal(folder)
    try:
        report = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{folder} has no rows.json; let the evaluation finish") from error
    reported = {_cell(row): row["samples"] for row in report["rows"] if row["task"] != OVERALL}
    outcomes = [outcome for outcome in held if _cell_of(outcome) in reported]
    if Counter(map(_cell_of, outcomes)) != reported:
        raise InvalidRequest(
            f"{folder} holds outcomes of other prompts than its rows.json counts; run the command again if it was"
            " interrupted, and evaluate every split and number of samples into a folder of its own"
        )
    return subject, report["about"], outcomes


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["context_tokens"], row["recipe"], row["ratio"], row.get("coverage")


def _cell_of(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.task, outcome.context_tokens, *outcome.label


def _method(outcome: Outcome) -> str:
    """The recipe's name without its preparation's."""
    return outcome.recipe.rpartition("+")[2]


def _together(folders: Sequence[Path], parts: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Each outcome once; full attention and reuse stand in every folder. Raises InvalidRequest if two disagree."""
    found: dict[Key, Outcome] = {}
    for folder, outcomes in zip(folders, parts, strict=True):
        for outcome in outcomes:
            first = found.setdefault((outcome.sample, outcome.label), outcome)
            if (first.answer, first.score) != (outcome.answer, outcome.score):
                raise InvalidRequest(
                    f"{folder} has another answer to {outcome.sample} under {outcome.recipe} than an earlier folder;"
                    " evaluate both anew"
                )
    return list(found.values())


def _without_place(command: str) -> str:
    words = shlex.split(command)
    for place, word in enumerate(words):
        if word.startswith("--output="):
            words[place] = f"--output={Path(word.removeprefix('--output=')).name}"
        elif place and words[place - 1] == "--output":
            words[place] = Path(word).name
    return shlex.join(words)
