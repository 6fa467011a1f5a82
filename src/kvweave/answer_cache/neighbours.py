"""Finds the answered questions with the most similar vectors or letters, in memory.

Typing errors move a vector far and change few letters. A process reads the questions once, and later those that came in.
Does not know what the questions say.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

from kvweave.answer_cache.records import Vector
from kvweave.database import Database

_MOST_SETTINGS: Final = 4
"""The number of settings whose vectors are in memory."""

_MOST_LETTERS: Final = 6
"""The number of letters and digits by which a question with typing errors may differ from the stored one."""

_LONGEST: Final = 400
"""Longer questions are not searched for by their letters."""

Versions = list[tuple[int, float]]
"""Each answered question's id, and when it was answered."""


class Neighbours:
    """The vectors of answered questions in the table `banked_questions` of `database`; threads may share one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[tuple[Any, ...], Versions, tuple[Any, ...]]] = {}
        self._lock = threading.Lock()

    def nearest(
        self, question: str, vector: Vector, answer_settings: str, most: int, at_least: float
    ) -> list[tuple[int, float]]:
        """Return ids and cosines of the `most` questions with the highest cosine to a vector (dimensions,), the highest first.

        Those below `at_least` are left out. Then come up to `most` others with almost the same letters as `question`, the most similar
        first. Takes a few milliseconds for 10,000 questions.
        """
        versions, vectors, letters = self._arrays(answer_settings)
        if not versions or vectors.shape[1] != len(vector):
            return []
        cosines = vectors @ vector  # (questions,)
        order = (-cosines).argsort(kind="stable")[:most]
        places = [int(place) for place in order if cosines[place] >= at_least]
        if len(question) <= _LONGEST:
            unlike = abs(letters - _letters([question])).sum(axis=1)  # (questions,)
            alike = (unlike <= _MOST_LETTERS).nonzero()[0]
            spelled = alike[unlike[alike].argsort(kind="stable")[:most]]
            places += [int(place) for place in spelled if place not in places]
        return [(versions[place][0], float(cosines[place])) for place in places]

    def _arrays(self, answer_settings: str) -> tuple[Versions, Any, Any]:
        """Return the answered questions under these settings, their vectors (questions, dimensions) and letters (questions, 36)."""
        answered = "FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL"
        # Any change of the list changes one of these sums, which the database computes faster than it hands over the list.
        (state,) = self._database.query(
            f"SELECT count(*), total(id), total(made_at) {answered}", (answer_settings,)
        )
        with self._lock:
            known = self._known.pop(answer_settings, ((), [], ()))
            if known[0] != state:
                versions: Versions = self._database.query(
                    f"SELECT id, made_at {answered} ORDER BY made_at, id", (answer_settings,)
                )
                known = (state, *self._read(versions, *known[1:]))
            self._known[answer_settings] = known  # last: the one that is forgotten last
            while len(self._known) > _MOST_SETTINGS:
                del self._known[next(iter(self._known))]
        return known[1], *known[2]

    def _read(
        self, versions: Versions, old: Versions, arrays: tuple[Any, ...]
    ) -> tuple[Versions, tuple[Any, Any]]:
        """Return the versions that still have a vector, with vectors and letters, reading only new ones from the table."""
        import json

        import numpy as np

        places = {version: place for place, version in enumerate(old)}
        new = [version[0] for version in versions if version not in places]
        rows = self._database.query(
            "SELECT id, vector, question FROM banked_questions WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(new),),
        )
        blobs = b"".join(row[1] for row in rows)
        read = (
            np.frombuffer(blobs, dtype="<f4").reshape(len(rows), -1 if rows else 0),
            _letters([row[2] for row in rows]),
        )
        read_places = {row[0]: len(old) + place for place, row in enumerate(rows)}
        kept = [version for version in versions if version in places or version[0] in read_places]
        both = (
            [np.concatenate(each) if len(each[1]) else each[0] for each in zip(arrays, read, strict=True)]
            if old
            else read
        )
        order = [places[version] if version in places else read_places[version[0]] for version in kept]
        return kept, (both[0][order], both[1][order])


def _letters(questions: Sequence[str]) -> Any:
    """Return the counts of the 26 letters and 10 digits in each question, (questions, 36); zeros for a long question."""
    import numpy as np

    signs = [text.lower().encode("ascii", "ignore") if len(text) <= _LONGEST else b"" for text in questions]
    rows = np.repeat(np.arange(len(signs)), np.array([len(each) for each in signs], dtype=np.int64))
    places = rows * 128 + np.frombuffer(b"".join(signs), dtype=np.uint8)
    counts = np.bincount(places, minlength=len(signs) * 128).reshape(len(signs), 128)
    return counts[:, [*range(ord("a"), ord("z") + 1), *range(ord("0"), ord("9") + 1)]].astype(np.int16)
