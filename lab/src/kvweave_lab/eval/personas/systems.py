"""The systems that are compared, each a few words about parts they share: answers, KV, and what is done at idle time.

Definitions are PerCache's (§5.2) where it compares with a system; the parts themselves are the engine's.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

Reuse: TypeAlias = Literal["none", "path", "anywhere"]
"""KV of chunks: computed anew; reused behind exactly the same chunks (RAGCache's tree); reused wherever a chunk stands."""
Matching: TypeAlias = Literal["none", "near", "same"]
"""Two questions share an answer: never; if their vectors are near (cosine ≥ τ); if, besides, they read the same."""
Foresees: TypeAlias = Literal["nothing", "notes", "abstract"]
"""Questions are predicted from nothing; from raw chunks; from an abstract of them, and from earlier questions."""
Projections: TypeAlias = Literal["KV", "QKV"]
"""What projection reuse skips for tokens whose KV is stored."""
Source: TypeAlias = Literal["asked", "predicted"]
"""Whose questions fill a layer: the user's, or predicted ones."""


@dataclass(frozen=True, slots=True)
class System:
    """One system.

    Attributes:
        name: in tables.
        kv: how stored KV is reused.
        fills_kv: whose questions leave KV behind.
        matching: when a banked answer is given.
        fills_answers: whose answers go into the bank.
        foresees: what questions are predicted from at idle time.
        projections: what projection reuse skips (table A).
        foretells: whether what a near question's answer or the prompt tells of a reply is checked in one pass.
    """

    name: str
    kv: Reuse = "none"
    fills_kv: frozenset[Source] = frozenset()
    matching: Matching = "none"
    fills_answers: frozenset[Source] = frozenset()
    foresees: Foresees = "nothing"
    projections: Projections = "KV"
    foretells: bool = False


_USERS: Final[frozenset[Source]] = frozenset({"asked"})
_AHEAD: Final[frozenset[Source]] = frozenset({"predicted"})
_BOTH: Final = _USERS | _AHEAD

NO_CACHE: Final = System("no cache")
RAGCACHE: Final = System("RAGCache", kv="path", fills_kv=_USERS)
MEANCACHE: Final = System("MeanCache", matching="near", fills_answers=_USERS)
SLEEP_TIME: Final = System("Sleep-time Compute", matching="near", fills_answers=_AHEAD, foresees="notes")
RAGCACHE_MEANCACHE: Final = replace(
    RAGCACHE, name="RAGCache + MeanCache", matching="near", fills_answers=_USERS
)
RAGCACHE_SLEEP_TIME: Final = replace(
    SLEEP_TIME, name="RAGCache + Sleep-time", kv=RAGCACHE.kv, fills_kv=RAGCACHE.fills_kv
)
PERCACHE: Final = System(
    "PerCache",
    kv="path",
    fills_kv=_BOTH,
    matching="near",
    fills_answers=_BOTH,
    foresees="abstract",
    projections="QKV",
)
OURS: Final = replace(PERCACHE, name="kvweave", kv="anywhere", matching="same", foretells=True)
TOKEN_BY_TOKEN: Final = replace(OURS, name=f"{OURS.name}, token by token", foretells=False)
"""The same sessions, priced as if every token of a reply were decoded by itself."""

SYSTEMS: Final = (
    NO_CACHE,
    RAGCACHE,
    MEANCACHE,
    SLEEP_TIME,
    RAGCACHE_MEANCACHE,
    RAGCACHE_SLEEP_TIME,
    PERCACHE,
    OURS,
)


def without(system: System, layer: Literal["answers", "KV", "prediction"]) -> System:
    """The system less one of its parts (PerCache §5.6)."""
    name = f"{system.name} without {layer}"
    if layer == "answers":
        return replace(system, name=name, matching="none", fills_answers=frozenset())
    if layer == "KV":
        return replace(system, name=name, kv="none", fills_kv=frozenset())
    return replace(
        system,
        name=name,
        foresees="nothing",
        fills_kv=system.fills_kv - _AHEAD,
        fills_answers=system.fills_answers - _AHEAD,
    )
