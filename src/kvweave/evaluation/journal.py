"""Outcomes on disk, one line each, so that an interrupted evaluation goes on where it stopped.

A line counts once it is complete: one torn by a crash is cut off and its prompt is run again. One process
writes at a time.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.evaluation.results import Label, Outcome, Trace

JOURNAL_VERSION = 6
"""What outcomes mean; raised with every change of a field, a task or a recipe after which older ones would mislead."""

_FILE = "outcomes.jsonl"

Key = tuple[str, Label]
"""A prompt under a recipe with a budget: sample name, and what ran."""


class Journal:
    """The outcomes of one evaluation, appended as they come.

    Args:
        folder: made if it is not there; None keeps outcomes in memory only.
        subject: what the outcomes are about (model, dtype, ...); the versions of kvweave and of the journal join it.
            A folder that holds outcomes of another subject is refused, so that one table never mixes two models.

    Raises:
        InvalidRequest: another subject's folder, a file that is no journal or is damaged, another process writing
            to it, or a folder that cannot be written to or locked.
    """

    def __init__(self, folder: Path | None, subject: Mapping[str, Any]) -> None:
        self._outcomes: dict[Key, Outcome] = {}
        self._file = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / _FILE
            self._file = open(self._path, "a+b")  # noqa: SIM115 - lives as long as the journal
        except OSError as error:
            raise InvalidRequest(
                f"{folder} cannot be written to ({error.strerror}); name another --output"
            ) from error
        self._lock()
        versions = {"journal": JOURNAL_VERSION, "kvweave version": kvweave.__version__}
        self._read(json.loads(_line({**versions, **subject})))  # as it would come back

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write; what was added stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, key: Key) -> Outcome | None:
        """The outcome that is there already, or None."""
        return self._outcomes.get(key)

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome; it is on its way to the disk when this returns."""
        self._outcomes[outcome.sample, outcome.label] = outcome
        if self._file is not None:
            self._file.write(_line(asdict(outcome)))
            self._file.flush()

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise InvalidRequest(
                    f"another evaluation is writing to {self._path}; wait for it or name another --output"
                ) from None
            raise InvalidRequest(
                f"{self._path} cannot be locked ({error.strerror}); name an --output on another file system"
            ) from error

    def _read(self, subject: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            outcomes = self._held(whole, content[len(whole) :], subject)
        except InvalidRequest:
            self.close()
            raise
        os.truncate(self._path, len(whole))  # a torn last line, once it is sure that the file is ours
        if not whole:
            self._file.write(_line(subject))
            self._file.flush()
        self._outcomes = {(outcome.sample, outcome.label): outcome for outcome in outcomes}

    def _held(self, whole: bytes, torn: bytes, subject: dict[str, Any]) -> list[Outcome]:
        """The outcomes in complete lines; raises InvalidRequest for another subject's, and for what is none."""
        if not whole and (not torn or torn.startswith(b"{")):
            return []
        first, *rest = whole.split(b"\n")[:-1] or [torn]
        said = _subject(first)
        if said.get("journal") != JOURNAL_VERSION:
            raise InvalidRequest(
                f"{self._path} is not a journal of this version of kvweave; name another --output"
            )
        changed = sorted(name for name in {*said, *subject} if said.get(name) != subject.get(name))
        if changed:
            raise InvalidRequest(
                f"{self._path} holds results that differ in {', '.join(changed)}; name another --output"
            )
        return _outcomes(self._path, rest)


def read_journal(folder: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """What a folder's outcomes are about, versions included, and the complete ones; changes nothing there.

    Raises:
        InvalidRequest: there is no journal of this version in the folder, or it is damaged.
    """
    path = folder / _FILE
    try:
        first, *rest = path.read_bytes().split(b"\n")[:-1] or [b""]
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}); name a folder that `kvweave eval --output` wrote"
        ) from error
    subject = _subject(first)
    if subject.get("journal") != JOURNAL_VERSION:
        raise InvalidRequest(f"{path} is not a journal of this version of kvweave; evaluate again")
    return subject, _outcomes(path, rest)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _outcomes(path: Path, lines: Sequence[bytes]) -> list[Outcome]:
    """From the lines behind the first."""
    return [_outcome(path, number, line) for number, line in enumerate(lines, 2)]


def _outcome(path: Path, number: int, line: bytes) -> Outcome:
    try:
        content = json.loads(line)
        return Outcome(**content | {"trace": Trace(**content["trace"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(
            f"{path}, line {number}, is damaged ({error}); delete that line and run again, which computes its"
            " outcome anew, or name another --output"
        ) from error


def _subject(line: bytes) -> dict[str, Any]:
    """What the first line says; nothing if it is no journal's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
