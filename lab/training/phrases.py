"""More ways to say what the evaluation's tasks say, and more kinds of what they tell: of training alone.

A split has a handful of sentences for each task, and a model that read no others learns those by heart instead of
reading. Those of `lab/training/sentences` widen the train split; no other split draws from them
(`tests/evaluation/test_splits.py`).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from kvweave_lab.eval import attributes
from kvweave_lab.eval.splits import TRAIN, Phrases
from kvweave_lab.eval.tasks import contradiction, coref, multiquery, multivalue, order, twohop, vartrack
from kvweave_lab.eval.tasks.coref import Reference
from kvweave_lab.eval.tasks.twohop import Relation

SENTENCES = Path(__file__).parent / "sentences"

_TOLD: Final = {
    "facts stated": attributes.STATED,
    "facts asked": attributes.ASKED,
    "facts asked twice": multiquery.ASKED,
    "multivalue owned": multivalue.OWNED,
    "multivalue asked": multivalue.ASKED,
    "contradiction corrected": contradiction.CORRECTED,
    "order happened": order.HAPPENED,
    "order asked": order.ASKED,
    "vartrack named": vartrack.NAMED,
    "vartrack holds": vartrack.HOLDS,
    "vartrack copies": vartrack.COPIES,
    "vartrack asked": vartrack.ASKED,
    "twohop collects": twohop.COLLECTS,
    "twohop asked": twohop.ASKED,
}
"""What each list that a task has sentences of its own for says otherwise."""

_ROLES: Final = (
    "uncle aunt doctor neighbor landlord partner cousin guide captain tailor trainer guardian master friend lawyer banker"
    " helper rival agent mentor cook driver barber customer tenant sister patron supplier successor"
).split()

CONTAINERS: Final = (
    *vartrack.PLACES, *"chest crate jar basket locker case tray bag room cupboard bin safe".split()
)  # fmt: skip


@cache
def lists() -> dict[str, tuple[str, ...]]:
    """Every list of the folder, under the name of its file and its own; choices in brackets are open."""
    return {
        f"{path.stem} {name}": tuple(lines)
        for path in sorted(SENTENCES.glob("*.txt"))
        for name, lines in _sections(path.read_text("utf-8"))
    }


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"^\[(?=[\w ]+\]$)", text, flags=re.MULTILINE)[1:]:
        name, *lines = part.strip().splitlines()
        yield name.removesuffix("]"), lines


@cache
def _told_otherwise() -> dict[int, tuple[str, ...]]:
    """By the identity of what they say otherwise, which lasts as long as the tasks do."""
    return {id(phrases): lists()[name] for name, phrases in _TOLD.items()}


def more(phrases: Phrases) -> tuple[str, ...]:
    """Further sentences that say what these of a task say, choices open; none where there are none."""
    return _told_otherwise().get(id(phrases), ())


@cache
def relations() -> tuple[Relation, ...]:
    """Those of the task, and roles that are told of in words for any role and in words of their own."""
    any_role = lists()["twohop related"]
    return (
        *twohop.RELATIONS,
        *(
            Relation(
                role,
                {
                    TRAIN: (
                        *(text.replace("ROLE", role) for text in any_role),
                        *lists().get(f"twohop related {role}", ()),
                    )
                },
            )
            for role in _ROLES
        ),
    )


def people() -> tuple[Reference, ...]:
    """The task's kind of reference to a person, and others."""
    return (coref.GUEST, *_references("person"))


def towns() -> tuple[Reference, ...]:
    """The task's kind of reference to a town, and others."""
    return (coref.TOWN, *_references("town"))


@cache
def _references(sort: str) -> tuple[Reference, ...]:
    kinds = dict.fromkeys(name.rpartition(" ")[0] for name in lists() if name.startswith(f"coref {sort} "))
    return tuple(
        Reference(*({TRAIN: lists()[f"{kind} {part}"]} for part in Reference._fields)) for kind in kinds
    )
