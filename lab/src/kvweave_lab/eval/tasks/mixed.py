"""Tasks whose sentences refer back from anywhere, so that no place in a chunk is favoured.

`coref-mixed`, `vartrack-mixed` and `contradiction-mixed` are those tasks with another layout. In each sample, drawn:

- how many natural sentences stand between the start of the chunk and the sentence that refers back: 0, 1, 2 or 4,
- where the sentence is that it refers to: at the end of the chunk before, or of the one before that. The chunk between the
  two continues their document or is of another one, as in a prompt whose chunks a retriever ordered,
- whether the chunk with that sentence was retrieved at all. In a quarter of the samples it was not, and the question has its
  answer in what is there: in another pair or chain that is whole, or in the statement whose correction was not retrieved.

`coref-permuted`, `vartrack-permuted` and `contradiction-permuted` have the same samples with their chunks in another order, in
which the chunk that refers back stands before the one it refers to.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal

from kvweave_lab.eval.documents import Apart, Draft, Piece, Question, Task
from kvweave_lab.eval.tasks.chains import write_vartrack
from kvweave_lab.eval.tasks.coref import write_coref
from kvweave_lab.eval.tasks.order import write_contradiction
from kvweave_lab.eval.world import World

DISTANCES: Final = (0, 1, 2, 4)
"""Sentences between the start of a chunk and the one that refers back."""

_MISSING = 0.25  # share of samples in which one of the two chunks is not in the prompt
_FAR = 1 / 3  # share of the others in which a chunk lies between the two
_INSERTED = 0.5  # share of these chunks that are of another document


class Placements:
    """Draws where pairs of sentences stand: that of the question first, then the others, which are all retrieved."""

    def __init__(self, world: World, missing: Literal["first", "then"]) -> None:
        self._rng = world.rng
        self._asked = self._drawn()
        if self._rng.random() < _MISSING:
            self._asked = replace(self._asked, missing=missing, chunks_back=1, inserted=False)
        self._made = 0

    @property
    def missing(self) -> bool:
        """Whether a chunk that belongs to the question was not retrieved."""
        return self._asked.missing is not None

    @property
    def name(self) -> str:
        """Where the sentence that the question is about stands."""
        asked = self._asked
        where = "not retrieved" if asked.missing else f"{asked.chunks_back} back"
        return f"{where}{', inserted' if asked.inserted else ''}, {asked.sentences} between"

    def piece(self, first: str, then: str) -> Piece:
        """Return the next pair."""
        placed = self._drawn() if self._made else self._asked
        self._made += 1
        return replace(placed, first=first, then=then)

    def _drawn(self) -> Apart:
        far = self._rng.random() < _FAR
        inserted = far and self._rng.random() < _INSERTED
        return Apart("", "", self._rng.choice(DISTANCES), 2 if far else 1, inserted)


def write_coref_mixed(world: World) -> Draft:
    """Return a pair that the question is about, another one apart and one inside a chunk; see `write_coref`.

    Where the name of the first pair was not retrieved, the question is about the pair inside a chunk.
    """
    placed = Placements(world, "first")
    draft = write_coref(world, cut=2, whole=1, related=placed.piece)
    return _asking(
        draft, placed, [question for question in draft.questions if question.task == "coref_whole"]
    )


def write_vartrack_mixed(world: World) -> Draft:
    """Return three chains of two links, two of which start in two chunks; see `write_vartrack`.

    Where the start of the first chain was not retrieved, the question is about the chain that starts inside a chunk.
    """
    placed = Placements(world, "first")
    draft = write_vartrack(world, cut=2, related=placed.piece)
    return _asking(
        draft, placed, [question for question in draft.questions if question.task == "vartrack"][2:]
    )


def write_contradiction_mixed(world: World) -> Draft:
    """Return two facts with a later sentence that corrects them, and two without; see `write_contradiction`.

    Where the correction of the first fact was not retrieved, the value before it is the answer.
    """
    placed = Placements(world, "then")
    draft = write_contradiction(world, corrected=1, related=placed.piece)
    asked = draft.questions[0]
    before = asked.reply.removesuffix(f", {asked.answers[0]}")
    return _asking(draft, placed, [replace(asked, answers=(before,), reply=before)])


def _asking(draft: Draft, placed: Placements, otherwise: list[Question]) -> Draft:
    """Put the questions first that can be answered where a chunk is missing, and name the placement."""
    if placed.missing:
        draft.questions = otherwise
    draft.placement = placed.name
    return draft


TASKS = (
    Task("coref-mixed", "exact_match", write_coref_mixed),
    Task("vartrack-mixed", "words_match_last", write_vartrack_mixed),
    Task("contradiction-mixed", "words_match_last", write_contradiction_mixed),
    Task("coref-permuted", "exact_match", write_coref_mixed),
    Task("vartrack-permuted", "words_match_last", write_vartrack_mixed),
    Task("contradiction-permuted", "words_match_last", write_contradiction_mixed),
)

PERMUTED: Mapping[str, str] = MappingProxyType(
    {f"{name}-permuted": f"{name}-mixed" for name in ("coref", "vartrack", "contradiction")}
)
"""For each task whose chunks are in another order: the task that has the same samples in the order of the text."""
