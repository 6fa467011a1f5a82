"""A set of documents and questions: reading it, checking it, and splitting it into dev and test.

The documents are text files in a folder. The questions are JSON lines with `id`, `question`, `answers`, `kind`, `evidence`
(a list of `doc` and `quote`) and, if the set is split already, `split`. Knows neither models nor retrieval.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from kvweave.errors import InvalidRequest

UNANSWERABLE: Final = "unanswerable"
"""The kind of the questions without an answer; any other word is a kind too."""
SPLITS: Final = ("dev", "test")
SHIPPED: Final = Path(__file__).parent / "data"

_SUFFIXES: Final = frozenset({".md", ".txt"})
_REQUIRED: Final = frozenset({"id", "question", "answers", "kind", "evidence"})
_SHOWN_FAULTS: Final = 5


@dataclass(frozen=True, slots=True)
class Evidence:
    """Words of a document that the answer rests on: the file's name, and the characters `start:end` of its text."""

    doc: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the documents.

    Attributes:
        id: unique in its set.
        text: as a user would ask it.
        answers: spellings of the answer, the document's own first; empty if there is none.
        kind: a word; the results of each kind are also shown alone.
        evidence: what the answer rests on; empty if there is no answer.
        split: dev or test.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    kind: str
    evidence: tuple[Evidence, ...]
    split: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Documents by file name, and the questions to them."""

    documents: Mapping[str, str]
    questions: tuple[Question, ...]


def shipped_set() -> QuestionSet:
    """Return the set that comes with the lab."""
    return read_set(SHIPPED / "documents", SHIPPED / "questions.jsonl")


def read_set(folder: Path, file: Path) -> QuestionSet:
    """Read a set and check it; split it if no question names a split.

    Raises InvalidRequest that names the file, the lines and what is wrong with them.
    """
    documents = _read_documents(folder)
    lines = _read_text(file, "--questions").splitlines()
    reader = _LineReader(documents)
    for number, line in enumerate(lines, 1):
        if line.strip():
            reader.read(number, line)
    if reader.faults:
        shown = "; ".join(reader.faults[:_SHOWN_FAULTS])
        more = len(reader.faults) - _SHOWN_FAULTS
        raise InvalidRequest(f"{file}: {shown}" + (f"; and {more} more faults" if more > 0 else ""))
    if not reader.questions:
        raise InvalidRequest(f"{file} holds no questions; write one JSON object per line")
    questions = reader.questions
    if not any(question.split for question in questions):
        questions = split_by_document(questions)
    return QuestionSet(documents, tuple(questions))


def split_by_document(questions: Sequence[Question]) -> list[Question]:
    """Return the questions, half of them dev and half test; documents that a question links are in one split.

    The same questions always give the same splits. Questions without evidence alternate.
    """
    groups = _linked(questions)
    asked: dict[str, int] = defaultdict(int)
    for question in questions:
        if question.evidence:
            asked[groups[question.evidence[0].doc]] += 1
    totals = dict.fromkeys(SPLITS, 0)
    split_of: dict[str, str] = {}
    for group in sorted(asked, key=lambda name: (-asked[name], _digest(name))):
        split_of[group] = min(SPLITS, key=totals.__getitem__)
        totals[split_of[group]] += asked[group]
    without = sorted((question.id for question in questions if not question.evidence), key=_digest)
    alternate = {name: SPLITS[place % len(SPLITS)] for place, name in enumerate(without)}
    return [
        replace(
            question,
            split=split_of[groups[question.evidence[0].doc]] if question.evidence else alternate[question.id],
        )
        for question in questions
    ]


def _linked(questions: Iterable[Question]) -> dict[str, str]:
    """Return for each document the first name of its group: documents that questions link, also through others."""
    group: dict[str, set[str]] = {}
    for question in questions:
        joined = {evidence.doc for evidence in question.evidence}
        for doc in sorted(joined):
            joined |= group.get(doc, set())
        group.update(dict.fromkeys(joined, joined))
    return {doc: min(linked) for doc, linked in group.items()}


def _digest(name: str) -> str:
    return xxhash.xxh3_64_hexdigest(name.encode())


class _LineReader:
    """Reads questions line by line, and collects what is wrong."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self._documents = documents
        self._ids: dict[str, int] = {}
        self.questions: list[Question] = []
        self.faults: list[str] = []

    def read(self, number: int, line: str) -> None:
        """Add the question of a line, or its faults."""
        try:
            content = json.loads(line)
        except ValueError as error:
            self.faults.append(f"line {number} is no JSON ({error})")
            return
        faults = _form_faults(content)
        if faults:
            self._blame(number, content, faults)
            return
        evidence, faults = self._find(content["evidence"])
        faults += _answer_faults(content)
        name = content["id"]
        if name in self._ids:
            faults.append(f"line {self._ids[name]} has the same id; give each question its own")
        self._ids.setdefault(name, number)
        self._blame(number, content, faults)
        self.questions.append(
            Question(
                name,
                content["question"],
                tuple(content["answers"]),
                content["kind"],
                tuple(evidence),
                content.get("split", ""),
            )
        )

    def _blame(self, number: int, content: Any, faults: Iterable[str]) -> None:
        name = content.get("id", "no id") if isinstance(content, dict) else "no id"
        self.faults += [f"line {number} ({name}): {fault}" for fault in faults]

    def _find(self, quotes: Sequence[Mapping[str, str]]) -> tuple[list[Evidence], list[str]]:
        found, faults = [], []
        for each in quotes:
            doc, quote = each["doc"], each["quote"]
            if doc not in self._documents:
                faults.append(f"evidence names {doc!r}, which is not in the folder of documents")
                continue
            place = _place(quote, self._documents[doc])
            if place is None:
                faults.append(
                    f"the quote {_short(quote)} does not stand in {doc}; quote its words as they are"
                )
            else:
                found.append(Evidence(doc, *place))
        return found, faults


def _place(quote: str, text: str) -> tuple[int, int] | None:
    """Return the first and the end character of a quote in a text; runs of white space count as equal."""
    found = re.search(r"\s+".join(map(re.escape, quote.split())), text)
    return found.span() if found else None


def _form_faults(content: Any) -> list[str]:
    """Return which fields of a line are missing or of the wrong type."""
    if not isinstance(content, dict):
        return ["is no JSON object; write one object per line"]
    missing = sorted(_REQUIRED - content.keys())
    if missing:
        return [f"has no {', '.join(missing)}"]
    texts = [name for name in ("id", "question") if not _is_text(content[name])]
    faults = [f"{name} must be a text that is not empty" for name in texts]
    if not (isinstance(content["answers"], list) and all(map(_is_text, content["answers"]))):
        faults.append("answers must be a list of texts")
    if not (isinstance(content["evidence"], list) and all(map(_is_evidence, content["evidence"]))):
        faults.append('evidence must be a list of {"doc": …, "quote": …}')
    if not (_is_text(content["kind"]) and len(content["kind"].split()) == 1):
        faults.append(f"kind is {content['kind']!r}; it must be one word, such as within or {UNANSWERABLE}")
    if content.get("split", SPLITS[0]) not in SPLITS:
        faults.append(f"split is {content['split']!r}; choose one of {', '.join(SPLITS)}, or leave it out")
    return faults


def _answer_faults(content: Mapping[str, Any]) -> list[str]:
    """Return the errors in the answers of a well-formed line."""
    answers, evidence = content["answers"], content["evidence"]
    if content["kind"] == UNANSWERABLE:
        return ["an unanswerable question has no answers and no evidence"] if answers or evidence else []
    if not answers or not evidence:
        return ["has no answers or no evidence; only an unanswerable question has none"]
    quoted = " ".join(" ".join(each["quote"].split()) for each in evidence).lower()
    if not any(" ".join(answer.split()).lower() in quoted for answer in answers):
        return [f"none of the answers {answers} stands in the quotes"]
    return []


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_evidence(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("doc")) and _is_text(value.get("quote"))


def _short(quote: str) -> str:
    return repr(quote if len(quote) <= 60 else f"{quote[:60]}…")


def _read_documents(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise InvalidRequest(f"--documents {folder} is no folder; name one with .md or .txt files")
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise InvalidRequest(f"--documents {folder} holds no .md or .txt file")
    return {path.name: _read_text(path, "--documents") for path in files}


def _read_text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{option} {path} cannot be read as UTF-8 text ({error})") from error
