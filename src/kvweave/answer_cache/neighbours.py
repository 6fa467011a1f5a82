"""Finds the answered questions whose vectors are nearest to one, in memory.

A process reads the vectors of the questions once, and later those that came in. Does not know what the questions say.
"""

import threading
from typing import Any, Final

from kvweave.answer_cache.records import Vector
from kvweave.database import Database

_MOST_SETTINGS: Final = 4
"""How many settings have their vectors in memory."""

Versions = list[tuple[int, float]]
"""Each answered question's id, and when it was answered."""


class Neighbours:
    """The vectors of answered questions in the table `banked_questions` of `database`; threads may share one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[tuple[Any, ...], Versions, Any]] = {}
        self._lock = threading.Lock()

    def nearest(
        self, vector: Vector, circumstances: str, most: int, at_least: float
    ) -> list[tuple[int, float]]:
        """Return ids and cosines of the `most` questions nearest to a vector (dimensions,), the nearest first.

        Those with a cosine below `at_least` are left out. Takes a few milliseconds for 10,000 questions.
        """
        versions, vectors = self._vectors(circumstances)
        if not versions or vectors.shape[1] != len(vector):
            return []
        cosines = vectors @ vector  # (questions,)
        order = (-cosines).argsort(kind="stable")[:most]
        return [(versions[place][0], float(cosines[place])) for place in order if cosines[place] >= at_least]

    def _vectors(self, circumstances: str) -> tuple[Versions, Any]:
        """Return the answered questions under these settings and their vectors (questions, dimensions)."""
        answered = "FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL"
        # Any change of the list changes one of these sums, which the database computes faster than it hands over the list.
        (state,) = self._database.query(
            f"SELECT count(*), total(id), total(made_at) {answered}", (circumstances,)
        )
        with self._lock:
            known = self._known.pop(circumstances, ((), [], None))
            if known[0] != state:
                versions: Versions = self._database.query(
                    f"SELECT id, made_at {answered} ORDER BY made_at, id", (circumstances,)
                )
                known = (state, *self._read(versions, *known[1:]))
            self._known[circumstances] = known  # last: the one that is forgotten last
            while len(self._known) > _MOST_SETTINGS:
                del self._known[next(iter(self._known))]
        return known[1:]

    def _read(self, versions: Versions, old: Versions, vectors: Any) -> tuple[Versions, Any]:
        """Return the versions that still have a vector, with their vectors: the old ones, and the new ones from the table."""
        import json

        import numpy as np

        places = {version: place for place, version in enumerate(old)}
        new = [version[0] for version in versions if version not in places]
        rows = self._database.query(
            "SELECT id, vector FROM banked_questions WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(new),),
        )
        blobs = dict(rows)
        read = np.frombuffer(b"".join(blobs.values()), dtype="<f4").reshape(len(blobs), -1 if blobs else 0)
        read_places = {id_: place for place, id_ in enumerate(blobs)}
        kept = [version for version in versions if version in places or version[0] in blobs]
        if vectors is None or not len(vectors):
            return kept, read[[read_places[id_] for id_, _ in kept]] if kept else read
        both = np.concatenate([vectors, read]) if len(read) else vectors
        order = [
            places[version] if version in places else len(vectors) + read_places[version[0]]
            for version in kept
        ]
        return kept, both[order]
