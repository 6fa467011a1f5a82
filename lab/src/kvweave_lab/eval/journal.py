"""Outcomes on disk, one line each, so that an interrupted evaluation goes on where it stopped.

A line counts once it is complete: one torn by a crash is cut off and its prompt is run again. One process
writes at a time.
"""

import fcntl
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import kvweave
from kvweave.errors import InvalidRequest
from kvweave_lab.eval.results import Label, Outcome, Trace

JOURNAL_VERSION = 6
"""What outcomes mean; raised with every change of a field, a task or a recipe after which older ones would mislead."""

_FILE = "outcomes.jsonl"

Key = tuple[str, Label]
"""A prompt under a recipe with a budget: sample name, and what ran."""

Key_ = TypeVar("Key_", bound=Hashable)
T = TypeVar("T")


class LineJournal(Generic[Key_, T]):
    """Results of one evaluation, a line each, appended as they come.

    Args:
        folder: made if it is not there; None keeps results in memory only.
        subject: what the results are about (model, dtype, ...); the versions of kvweave and of the journal join it.
            A folder that holds results of another subject is refused, so that one table never mixes two models.
        file: its name in the folder.
        version: of what a line means.
        key: what names a result.
        read: a result from what its line says; raises ValueError, TypeError or KeyError where it does not say one.

    Raises:
        InvalidRequest: another subject's folder, a file that is no journal or is damaged, another process writing
            to it, or a folder that cannot be written to or locked.
    """

    def __init__(
        self,
        folder: Path | None,
        subject: Mapping[str, Any],
        *,
        file: str,
        version: int,
        key: Callable[[T], Key_],
        read: Callable[[dict[str, Any]], T],
    ) -> None:
        self._key_of, self._from_line, self._version = key, read, version
        self._outcomes: dict[Key_, T] = {}
        self._file = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / file
            self._file = open(self._path, "a+b")  # noqa: SIM115 - lives as long as the journal
        except OSError as error:
            raise InvalidRequest(
                f"{folder} cannot be written to ({error.strerror}); name another --output"
            ) from error
        self._lock()
        versions = {"journal": version, "kvweave version": kvweave.__version__}
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

    def get(self, key: Key_) -> T | None:
        """The result that is there already, or None."""
        return self._outcomes.get(key)

    def add(self, outcome: T) -> None:
        """Keep a result, a dataclass; it is on its way to the disk when this returns."""
        self._outcomes[self._key_of(outcome)] = outcome
        if self._file is not None:
            self._file.write(_line(asdict(cast(Any, outcome))))
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
        self._outcomes = {self._key_of(outcome): outcome for outcome in outcomes}

    def _held(self, whole: bytes, torn: bytes, subject: dict[str, Any]) -> list[T]:
        """The results in complete lines; raises InvalidRequest for another subject's, and for what is none."""
        if not whole and (not torn or torn.startswith(b"{")):
            return []
        first, *rest = whole.split(b"\n")[:-1] or [torn]
        said = _subject(first)
        if said.get("journal") != self._version:
            raise InvalidRequest(
                f"{self._path} is not a journal of this version of kvweave; name another --output"
            )
        changed = sorted(name for name in {*said, *subject} if said.get(name) != subject.get(name))
        if changed:
            raise InvalidRequest(
                f"{self._path} holds results that differ in {', '.join(changed)}; name another --output"
            )
        return _results(self._path, rest, self._from_line)


class Journal(LineJournal[Key, Outcome]):
    """The outcomes of prompts under recipes, as LineJournal keeps them; raises as it does."""

    def __init__(self, folder: Path | None, subject: Mapping[str, Any]) -> None:
        super().__init__(
            folder,
            subject,
            file=_FILE,
            version=JOURNAL_VERSION,
            key=lambda outcome: (outcome.sample, outcome.label),
            read=_outcome,
        )


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
    return subject, _results(path, rest, _outcome)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _results(path: Path, lines: Sequence[bytes], read: Callable[[dict[str, Any]], T]) -> list[T]:
    """From the lines behind the first."""
    return [_result(path, number, line, read) for number, line in enumerate(lines, 2)]


def _result(path: Path, number: int, line: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return read(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(
            f"{path}, line {number}, is damaged ({error}); delete that line and run again, which computes its"
            " outcome anew, or name another --output"
        ) from error


def _outcome(content: dict[str, Any]) -> Outcome:
    return Outcome(**content | {"trace": Trace(**content["trace"])})


def _subject(line: bytes) -> dict[str, Any]:
    """What the first line says; nothing if it is no journal's."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
