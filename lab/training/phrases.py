"""Further sentences for the evaluation's tasks, and further kinds of facts, for training only.

A split has only a few sentences for each task, and a model may memorize them instead of reading. The sentences in
`lab/training/sentences` extend the train split; no other split uses them (`lab/tests/eval/test_world.py`).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from kvweave_lab.eval.tasks import chains, coref, needles, order
from kvweave_lab.eval.tasks.chains import Relation
from kvweave_lab.eval.tasks.coref import Reference
from kvweave_lab.eval.world import TRAIN, Phrases

SENTENCES = Path(__file__).parent / "sentences"

LISTED_PHRASES: Final = {
    "facts stated": needles.STATED,
    "facts asked": needles.ASKED,
    "facts asked twice": needles.TWO_ASKED,
    "multivalue owned": needles.OWNED,
    "multivalue asked": needles.OWNED_ASKED,
    "contradiction corrected": order.CORRECTED,
    "order happened": order.HAPPENED,
    "order asked": order.FIRST_ASKED,
    "vartrack named": chains.NAMED,
    "vartrack holds": chains.HOLDS,
    "vartrack copies": chains.COPIES,
    "vartrack asked": chains.CONTENT_ASKED,
    "twohop collects": chains.COLLECTS,
    "twohop asked": chains.TREASURE_ASKED,
}
"""The task's phrases that each list extends."""

_ROLES: Final = (
    "uncle aunt doctor neighbor landlord partner cousin guide captain tailor trainer guardian master friend lawyer banker"
    " helper rival agent mentor cook driver barber customer tenant sister patron supplier successor"
).split()

CONTAINERS: Final = (
    *chains.PLACES, *"chest crate jar basket locker case tray bag room cupboard bin safe".split()
)  # fmt: skip


@cache
def sentence_lists() -> dict[str, tuple[str, ...]]:
    """Return every list of the folder by its file and name; sentences have choices in brackets."""
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
def _by_identity() -> dict[int, tuple[str, ...]]:
    """Return the lists by the identity of the phrases that they extend; phrases are module constants."""
    return {id(phrases): sentence_lists()[name] for name, phrases in LISTED_PHRASES.items()}


def further_phrases(phrases: Phrases) -> tuple[str, ...]:
    """Return further sentences with the meaning of a task's phrases, with choices in brackets; maybe none."""
    return _by_identity().get(id(phrases), ())


@cache
def relations() -> tuple[Relation, ...]:
    """Return the task's relations, and further ones with general sentences and sentences of their own."""
    any_role = sentence_lists()["twohop related"]
    return (
        *chains.RELATIONS,
        *(
            Relation(
                role,
                {
                    TRAIN: (
                        *(text.replace("ROLE", role) for text in any_role),
                        *sentence_lists().get(f"twohop related {role}", ()),
                    )
                },
            )
            for role in _ROLES
        ),
    )


def people() -> tuple[Reference, ...]:
    """Return the task's and further kinds of references to people."""
    return (coref.GUEST, *_references("person"))


def towns() -> tuple[Reference, ...]:
    """Return the task's and further kinds of references to towns."""
    return (coref.TOWN, *_references("town"))


@cache
def _references(sort: str) -> tuple[Reference, ...]:
    kinds = dict.fromkeys(
        name.rpartition(" ")[0] for name in sentence_lists() if name.startswith(f"coref {sort} ")
    )
    return tuple(
        Reference(*({TRAIN: sentence_lists()[f"{kind} {part}"]} for part in Reference._fields))
        for kind in kinds
    )
