"""MISeD's lines as users: a meeting's transcript, and the questions of a dialog about it. The data is not part of kvweave.

A line holds `meeting`, with `transcriptSegments` of `speakerName` and `text`, and `dialog`, with `dialogTurns` of `query` and
`response`. Several lines about one meeting are several users.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.personas.people import Asked, Note, User
from kvweave_lab.eval.readers.records import FeatureExtractor, records

_SEGMENTS: Final = 20
"""Segments of a transcript that make a note."""


def read_mised(path: Path, users: int, questions: int) -> list[User]:
    """The first so many dialogs of a .jsonl file, with so many questions each at most.

    Raises InvalidRequest for a file without usable lines.
    """
    found = [_user(record, questions) for record in islice(records(path), users)]
    if not found:
        raise InvalidRequest(f"{path} holds no dialog; name MISeD's .jsonl file")
    return found


def _user(record: FeatureExtractor, questions: int) -> User:
    spoken = [
        f"{_text(record, segment, 'speakerName')}: {_text(record, segment, 'text')}"
        for segment in _listed(record, "meeting", "transcriptSegments")
    ]
    name = f"{record.path.stem}-{record.line:04}"
    notes = tuple(
        Note(f"{name}-{start:05}.txt", "\n".join(spoken[start : start + _SEGMENTS]))
        for start in range(0, len(spoken), _SEGMENTS)
    )
    asked = tuple(
        Asked(_text(record, turn, "query"), (_text(record, turn, "response"),), f"{record.digest} {number}")
        for number, turn in enumerate(_listed(record, "dialog", "dialogTurns"))
    )
    return User(name, "meeting", notes, asked[:questions])


def _listed(record: FeatureExtractor, outer: str, inner: str) -> Sequence[Mapping[str, Any]]:
    whole = record.fields.get(outer)
    listed = whole.get(inner) if isinstance(whole, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise record.invalid(f"the field {outer!r} holds no list {inner!r} of objects")
    return listed


def _text(record: FeatureExtractor, fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise record.invalid(f"a field {name!r} is missing or no string")
    return value
