"""Results of a run, one line each in one file, so that an interrupted run resumes.

The file's first line is the run configuration: everything that the results depend on. A log of another
configuration is refused, so no table mixes two models. A line counts once it is complete: a line torn by a crash
is cut off, and its result is computed again. One process writes at a time.

Every evaluation and benchmark that resumes uses `ResultsLog`: it gives the file a name and a version, says what
identifies a result, and how a line is parsed.
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
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods.cacheclip import load_auxiliary

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class ResultsLog(Generic[Key, Result]):
    """The results of one run by key, in the order in which they were added. A context manager.

    Args:
        folder: created if it does not exist; None keeps results in memory only.
        run_config: what the results depend on (model, dtype, ...), as JSON values. The versions of kvweave and of
            the log join it.
        file: the log's name in the folder.
        version: of the meaning of a line; raise it when older results would mislead.
        key: returns what identifies a result.
        parse: returns a result from its line; raises ValueError, TypeError or KeyError for a line that is none.

    Raises:
        InvalidRequest: the folder holds results of another configuration, the file is no results log or is damaged,
            another process writes to it, or the folder cannot be written to or locked.
    """

    def __init__(
        self,
        folder: Path | None,
        run_config: Mapping[str, Any],
        *,
        file: str,
        version: int,
        key: Callable[[Result], Key],
        parse: Callable[[dict[str, Any]], Result],
    ) -> None:
        self._key, self._parse, self._version = key, parse, version
        self._results: dict[Key, Result] = {}
        self._file = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / file
            self._file = open(self._path, "a+b")  # noqa: SIM115 - open for as long as the log
        except OSError as error:
            raise InvalidRequest(
                f"{folder} cannot be written to ({error.strerror}); name another --output"
            ) from error
        self._lock()
        config = {_VERSION_KEY: version, "kvweave version": kvweave.__version__, **run_config}
        self._load(json.loads(_line(config)))  # as it is read back

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the file; added results stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def results(self) -> list[Result]:
        """Every result, earlier runs' first."""
        return list(self._results.values())

    def get(self, key: Key) -> Result | None:
        """Return the result with this key, or None."""
        return self._results.get(key)

    def add(self, result: Result) -> None:
        """Append a result, a dataclass; the operating system has its line when this returns."""
        self._results[self._key(result)] = result
        if self._file is not None:
            self._file.write(_line(asdict(cast(Any, result))))
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

    def _load(self, config: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        try:
            results = self._parse_all(complete, content[len(complete) :], config)
        except InvalidRequest:
            self.close()
            raise
        os.truncate(self._path, len(complete))  # a torn last line, now that the file is known to be ours
        if not complete:
            self._file.write(_line(config))
            self._file.flush()
        self._results = {self._key(result): result for result in results}

    def _parse_all(self, complete: bytes, torn: bytes, config: dict[str, Any]) -> list[Result]:
        """Return the results in complete lines; raises InvalidRequest for another run's and for another kind of file."""
        if not complete and (not torn or torn.startswith(b"{")):
            return []
        first, *rest = complete.split(b"\n")[:-1] or [torn]
        found = _parse_config(first)
        if found.get(_VERSION_KEY) != self._version:
            raise InvalidRequest(
                f"{self._path} is not a results log of this version of kvweave; name another --output"
            )
        changed = sorted(name for name in {*found, *config} if found.get(name) != config.get(name))
        if changed:
            raise InvalidRequest(
                f"{self._path} holds results that differ in {', '.join(changed)}; name another --output"
            )
        return _parse_lines(self._path, rest, self._parse)


def read_results(
    path: Path, version: int, parse: Callable[[dict[str, Any]], Result]
) -> tuple[dict[str, Any], list[Result]]:
    """Return the run configuration in a log, versions included, and its complete results. Changes nothing.

    Raises:
        InvalidRequest: the file cannot be read, is no results log of this version, or is damaged.
    """
    try:
        first, *rest = path.read_bytes().split(b"\n")[:-1] or [b""]
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}); name a folder that `kvweave eval --output` wrote"
        ) from error
    config = _parse_config(first)
    if config.get(_VERSION_KEY) != version:
        raise InvalidRequest(f"{path} is not a results log of this version of kvweave; evaluate again")
    return config, _parse_lines(path, rest, parse)


def run_config(adapter: Adapter, auxiliary: str | None = None) -> dict[str, Any]:
    """Return the settings that outcomes depend on besides prompt, recipe and budget, by name.

    The critical layers are those that `kvweave profile-layers` found. The embedding model finds the documents that
    are similar to a sample's. `auxiliary` is the model of recipes with an auxiliary model, None for the shipped one.
    Raises ModelNotFound if there is no such auxiliary model.
    """
    return {
        "model": adapter.fingerprint.digest,
        "dtype": dtype_name(adapter),
        "critical layers": list(adapter.critical_layers),
        "auxiliary": load_auxiliary(auxiliary).adapter.fingerprint.digest,
        "embedding": TextEncoder().name,
    }


def dtype_name(adapter: Adapter) -> str:
    """Return the number format of weights and KV, such as float32."""
    return str(adapter.geometry.dtype).removeprefix("torch.")


_VERSION_KEY = "journal"
"""The key of the log's version in its first line, which files of earlier runs have."""


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _parse_config(line: bytes) -> dict[str, Any]:
    """Return the configuration in the first line; nothing if the line holds none."""
    try:
        config = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _parse_lines(
    path: Path, lines: Sequence[bytes], parse: Callable[[dict[str, Any]], Result]
) -> list[Result]:
    """Return the results in the lines after the first."""
    return [_parse_line(path, number, line, parse) for number, line in enumerate(lines, 2)]


def _parse_line(path: Path, number: int, line: bytes, parse: Callable[[dict[str, Any]], Result]) -> Result:
    try:
        return parse(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(
            f"{path}, line {number}, is damaged ({error}); delete that line and run again, which computes its"
            " outcome again, or name another --output"
        ) from error
