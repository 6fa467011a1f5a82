"""Workloads on a small home, and what must be true after each step, whatever happens in between.

A step that was acknowledged has happened. One that was begun has happened or not, document by document. Nothing else has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from kvweave.errors import StoreError
from kvweave.files import sync_folder, write_atomically
from kvweave.knowledge_base import KnowledgeBase

NAMES: Final = ("a", "b", "c", "d")
QUESTIONS: Final = ("what about the river", "who built the bridge", "is the mill old")
_THINGS: Final = ("river", "bridge", "mill", "forest")
_WEIGHTS: Final = {
    "add": 5, "remove": 3, "ask": 3, "chat": 2, "limit": 1, "verify": 1, "clear": 1, "idle": 1, "reopen": 2,
}  # fmt: skip
_LIMITS: Final = (20_000, 60_000, 10**9)
ABSENT: Final = 0
"""The version of a document that is not listed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a user does: `name` and `version` of a document, a question or a limit, where the kind has one."""

    kind: str
    name: str = ""
    version: int = ABSENT
    question: str = ""
    limit_bytes: int = 0


@dataclass(frozen=True)
class Truth:
    """What must be true of a home.

    Attributes:
        documents: the versions of each document that may be listed.
        questions: what the conversation must hold, unless a document was removed or changed since.
        kept: whether the conversation must hold them.
        limits: caps that may be in force; empty if none was set.
        written: all versions of documents that were ever in the home.
    """

    documents: dict[str, frozenset[int]] = field(default_factory=dict)
    questions: tuple[str, ...] = ()
    kept: bool = True
    limits: frozenset[int] = frozenset()
    written: frozenset[tuple[str, int]] = frozenset()

    def after(self, step: Step) -> "Truth":
        """Return what is true once a step is acknowledged."""
        match step.kind:
            case "add" | "remove":
                changed = self.documents.get(step.name, frozenset({ABSENT})) != frozenset({ABSENT})
                return replace(
                    self,
                    documents={**self.documents, step.name: frozenset({step.version})},
                    written=self.written | ({(step.name, step.version)} if step.version else set()),
                    kept=self.kept and not (changed and self.questions),
                )
            case "chat":
                return replace(
                    self, questions=(*self.questions, step.question) if self.kept else self.questions
                )
            case "limit":
                return replace(self, limits=frozenset({step.limit_bytes}))
        return self

    def during(self, step: Step) -> "Truth":
        """Return what is true while a step is under way, or after it has failed: before or after it."""
        after = self.after(step)
        before = self.documents.get(step.name, frozenset({ABSENT}))
        documents = {**self.documents}
        if step.name:
            documents[step.name] = before | after.documents[step.name]
        return replace(
            after,
            documents=documents,
            questions=self.questions,
            limits=self.limits | after.limits if self.limits else self.limits,
        )


def marker(name: str, version: int) -> str:
    """Return a word that only this version of a document has."""
    letters = ""
    for _ in range(4):
        version, digit = divmod(version, 20)
        letters += "bcdfghjklmnpqrstvwxz"[digit]
    return f"zqv{name}{letters}"


def text_of(name: str, version: int) -> str:
    """Return the text of a version of a document, of two or three chunks."""
    word, thing = marker(name, version), _THINGS[(ord(name) + version) % len(_THINGS)]
    return (
        f"Note {word}: the {thing} is in the north.\n\n"
        + f"Part two of {word}: no {thing} is new.\n\n" * (1 + version % 2)
    )


def draw(random: Random, steps: int, names: Sequence[str] = NAMES, first: int = 1) -> list[Step]:
    """Draw steps; versions count from `first`. The first step adds a document."""
    drawn, version, listed = list[Step](), first, set[str]()
    while len(drawn) < steps:
        kind = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0] if listed else "add"
        name = random.choice(names)
        question, limit = random.choice(QUESTIONS), random.choice(_LIMITS)
        match kind:
            case "add":
                drawn.append(Step(kind, name, version))
                version += 1
                listed.add(name)
            case "remove":
                name = random.choice(sorted(listed))
                drawn.append(Step(kind, name))
                listed.discard(name)
            case "ask" | "chat":
                drawn.append(Step(kind, question=question))
            case "limit":
                drawn.append(Step(kind, limit_bytes=limit))
            case _:
                drawn.append(Step(kind))
    return drawn


def document(root: Path, name: str) -> Path:
    """Return the user's file of a document."""
    return root / "documents" / f"{name}.txt"


def take(base: KnowledgeBase, root: Path, step: Step) -> None:
    """Do what a step says, as a user would."""
    path = document(root, step.name)
    match step.kind:
        case "add":
            draft = root / "draft"  # not beside it, where what a crash leaves of it would be a document
            write_atomically(draft, [text_of(step.name, step.version).encode()])
            draft.replace(path)
            sync_folder(path.parent)
            if skipped := base.add(path).skipped:  # the command fails then
                raise StoreError(skipped[0].reason)
        case "remove":
            path.unlink(missing_ok=True)
            base.remove(path)
        case "ask":
            base.ask(step.question)
        case "chat":
            with base.conversation("c") as conversation:
                for _ in base.send(conversation, step.question):
                    pass
        case "limit":
            base.store.set_limit(step.limit_bytes)
        case "verify":
            base.store.verify()
        case "clear":
            base.store.clear()
        case "idle":
            base.idle()
