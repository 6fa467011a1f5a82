"""The questions that a steady measurement has asked, one line each, so that an interrupted one goes on where it stopped.

A line torn by a crash is cut off, and its question asked again. Knows nothing of how questions are measured.
"""

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kvweave
from kvweave.errors import InvalidRequest
from kvweave_lab.bench.steady_results import SteadyRow

_FILE = "steady.jsonl"


class SteadyJournal:
    """Rows in the order of the questions; a context manager.

    Args:
        folder: made if it is not there; None keeps rows in memory only.
        subject: what they are about. A folder that holds rows about something else is refused.

    Attributes:
        rows: those that are there.
        started_at: before which questions a process started, this one included.

    Raises:
        InvalidRequest: another subject's folder, one that another process writes to, or a file that is no journal.
    """

    def __init__(self, folder: Path | None, subject: Mapping[str, Any]) -> None:
        self.rows: list[SteadyRow] = []
        self.started_at: list[int] = []
        self._file = None
        if folder is None:
            self.started_at.append(0)
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _FILE
        self._file = open(path, "a+b")  # noqa: SIM115 - lives as long as the journal
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path, json.loads(json.dumps({"kvweave": kvweave.__version__, **subject})))
        except BlockingIOError:
            self.close()
            raise InvalidRequest(f"another measurement is writing to {path}; name another --output") from None
        except InvalidRequest:
            self.close()
            raise

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

    def begin(self) -> None:
        """Note that a process is about to ask the next question."""
        if self._file is not None:
            self.started_at.append(len(self.rows))
            self._write({"start": len(self.rows)})

    def add(self, row: SteadyRow) -> None:
        """Keep a row; it is on its way to the disk when this returns."""
        self.rows.append(row)
        self._write(asdict(row))

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content).encode() + b"\n")
            self._file.flush()

    def _read(self, path: Path, subject: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            said = dict(lines[0]) if lines else subject
            self.rows = [SteadyRow(**line) for line in lines[1:] if "start" not in line]
            self.started_at = [int(line["start"]) for line in lines[1:] if "start" in line]
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"{path} is no journal of this measurement; name another --output"
            ) from error
        changed = sorted(name for name in {*said, *subject} if said.get(name) != subject.get(name))
        if changed:
            raise InvalidRequest(
                f"{path} holds questions of a measurement that differs in {', '.join(changed)}; name another --output"
            )
        if not lines and content:
            raise InvalidRequest(f"{path} is no journal of this measurement; name another --output")
        self._file.truncate(len(whole))
        if not lines:
            self._write(subject)
