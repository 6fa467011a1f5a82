"""Lines of JSON: which files, which fields, and errors that name the file and the line.

Knows no benchmark.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from kvweave.errors import InvalidRequest
from kvweave.index.chunking import Chunker
from kvweave.types import Document


@dataclass(frozen=True, slots=True)
class FeatureExtractor:
    """One line of a file: its number from 1, a digest of its bytes, and its fields."""

    path: Path
    line: int
    digest: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A field that is a string, which may be empty; raises InvalidRequest."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.invalid(f"the field {name!r} is {_kind(value)} and must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """The strings of a field that is a list of them, empty ones left out; raises InvalidRequest if none is left."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or not any(value):
            raise self.invalid(f"the field {name!r} is {_kind(value)} and must be a list of strings")
        return tuple(item for item in value if item)

    def chunks(self, context: str, chunker: Chunker) -> tuple[str, ...]:
        """A context cut into chunks; raises InvalidRequest if it is empty."""
        document = Document(source="", title="", text=context, digest=self.digest)
        chunks = tuple(chunk.text for chunk in chunker.split(document))
        if not chunks:
            raise self.invalid("the context is empty")
        return chunks

    def name(self, benchmark: str, task: str, chunker: Chunker) -> str:
        """A sample's name: the same wherever the file lies, another for other chunks or another content."""
        cut = f"{chunker.chunk_tokens}+{chunker.overlap_tokens}"
        return f"{benchmark}/{task}/{cut}/{self.line}-{self.digest}"

    def invalid(
        self, problem: str, remedy: str = "correct or remove the line, or get the file anew"
    ) -> InvalidRequest:
        """An error that says where the problem is and what to do."""
        return InvalidRequest(f"{self.path}, line {self.line}: {problem}; {remedy}")


def records(path: Path, limit: int | None = None) -> Iterator[FeatureExtractor]:
    """The records of a .jsonl file, or of every one below a folder in the order of their paths; `limit` per file.

    Empty lines are passed over. Raises InvalidRequest for a path without such a file, and for a line that is
    not one JSON object.
    """
    for file in files(path):
        filled = ((number, line) for number, line in _lines(file) if line.strip())
        yield from (_record(file, number, line) for number, line in islice(filled, limit))


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as lines:
            yield from enumerate(lines, 1)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read ({error.strerror}); check its permissions") from error


def files(path: Path) -> list[Path]:
    """A file, or every .jsonl file below a folder; raises InvalidRequest if there is none."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*.jsonl") if file.is_file())
    if not found:
        raise InvalidRequest(
            f"{path} is no file and no folder with .jsonl files; name the benchmark's own data"
        )
    return found


def _record(file: Path, number: int, line: bytes) -> FeatureExtractor:
    record = FeatureExtractor(file, number, xxhash.xxh3_64_hexdigest(line.strip())[:8], {})
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise record.invalid(f"not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise record.invalid(f"{_kind(fields)} where an object with named fields was expected")
    return FeatureExtractor(file, number, record.digest, fields)


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
