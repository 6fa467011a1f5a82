"""Benchmarks on disk: JSON lines with errors that name file and line, and LongBench's and RULER's data as samples.

LongBench is read as it is published: one jsonl file per data set; `_e` files (LongBench-E) as well. Metric and answer
length of each data set are official. The wording of the questions is ours: one instruction after the context instead
of one before and one after it, so that chunks come first in the prompt, where they can be reused.

RULER is read from the jsonl files that its `prepare.py` writes, one per task and length. A line's `input` is one
string: an opening, the context and a question, each in the words of the task's template. The opening identifies the
task's form, and the last place where the form's question begins splits the string. The part before it (the opening,
worked examples and the context) is cut into chunks. The question is asked, followed by the line's `answer_prefix` if
it has one. Joined, that is the prompt of RULER's own script, except for white space between the parts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from re import Pattern
from types import MappingProxyType
from typing import Any

import xxhash

from kvweave.documents.chunking import Chunker
from kvweave.errors import InvalidRequest
from kvweave.types import Document
from kvweave_lab.eval.metrics import with_classes
from kvweave_lab.eval.samples import Sample


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One line of a file: its number from 1, a digest of its bytes, and its fields."""

    path: Path
    line: int
    digest: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a string field, which may be empty; raises InvalidRequest for other types."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.invalid(f"the field {name!r} is {_described(value)} and must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the non-empty strings of a list field; raises InvalidRequest if there are none."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or not any(value):
            raise self.invalid(f"the field {name!r} is {_described(value)} and must be a list of strings")
        return tuple(item for item in value if item)

    def chunks(self, context: str, chunker: Chunker) -> tuple[str, ...]:
        """Return the chunks of a context; raises InvalidRequest if it is empty."""
        document = Document(source="", title="", text=context, digest=self.digest)
        chunks = tuple(chunk.text for chunk in chunker.split(document))
        if not chunks:
            raise self.invalid("the context is empty")
        return chunks

    def name(self, benchmark: str, task: str, chunker: Chunker) -> str:
        """Return a sample's name: the same for every path of the file, another for other chunks or content."""
        cut = f"{chunker.chunk_tokens}+{chunker.overlap_tokens}"
        return f"{benchmark}/{task}/{cut}/{self.line}-{self.digest}"

    def invalid(
        self, problem: str, remedy: str = "correct or remove the line, or get the file again"
    ) -> InvalidRequest:
        """Return an error that says where the problem is and what to do."""
        return InvalidRequest(f"{self.path}, line {self.line}: {problem}; {remedy}")


def read_records(path: Path, limit: int | None = None) -> Iterator[JsonRecord]:
    """Yield the records of a .jsonl file, or of every one below a folder in path order; at most `limit` per file.

    Skips empty lines. Raises InvalidRequest for a path without such a file, and for a line that is not one JSON
    object.
    """
    for file in jsonl_files(path):
        filled = ((number, line) for number, line in _lines(file) if line.strip())
        yield from (_record(file, number, line) for number, line in islice(filled, limit))


def jsonl_files(path: Path) -> list[Path]:
    """Return a file, or every .jsonl file below a folder; raises InvalidRequest if no file exists."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*.jsonl") if file.is_file())
    if not found:
        raise InvalidRequest(
            f"{path} is no file and no folder with .jsonl files; name the benchmark's own data"
        )
    return found


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as lines:
            yield from enumerate(lines, 1)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read ({error.strerror}); check its permissions") from error


def _record(file: Path, number: int, line: bytes) -> JsonRecord:
    record = JsonRecord(file, number, xxhash.xxh3_64_hexdigest(line.strip())[:8], {})
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise record.invalid(f"not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise record.invalid(f"{_described(fields)} where an object with named fields was expected")
    return JsonRecord(file, number, record.digest, fields)


def _described(value: object) -> str:
    if value is None:
        return "missing"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


@dataclass(frozen=True, slots=True)
class DataSet:
    """How a data set of LongBench is asked and scored.

    Attributes:
        metric: the official one; the best score over a line's answers counts.
        max_new_tokens: the official one.
        question: the question; {input} is the line's own part.
    """

    metric: str
    max_new_tokens: int
    question: str


_PHRASE = "Answer with a single phrase and nothing else: {input}"

_EXAMPLES = "Go on in the same way as in these examples.\n\n{input}"

_CODE = "{input}\n\nThe next line of this code, and nothing else, is:"

DATA_SETS: Mapping[str, DataSet] = MappingProxyType(
    {
        "narrativeqa": DataSet("f1", 128, _PHRASE),
        "qasper": DataSet(
            "f1",
            128,
            'Answer with a phrase or a sentence and nothing else; with "yes" or "no" where that is asked, and with'
            ' "unanswerable" where the article does not tell: {input}',
        ),
        "multifieldqa_en": DataSet("f1", 64, _PHRASE),
        "multifieldqa_zh": DataSet("f1_zh", 64, "请根据上文简短作答，只写答案：{input}"),
        "hotpotqa": DataSet("f1", 32, _PHRASE),
        "2wikimqa": DataSet("f1", 32, _PHRASE),
        "musique": DataSet("f1", 32, _PHRASE),
        "dureader": DataSet("rouge_l_zh", 128, "请根据上文作答：{input}"),
        "gov_report": DataSet("rouge_l", 512, "Summarize this report on one page."),
        "qmsum": DataSet("rouge_l", 512, "Answer from the transcript in one or more sentences: {input}"),
        "multi_news": DataSet("rouge_l", 512, "Summarize all of this news on one page."),
        "vcsum": DataSet("rouge_l_zh", 512, "请写一段文字，概括这次会议。"),
        "trec": DataSet("classification", 64, _EXAMPLES),
        "triviaqa": DataSet("f1_first_line", 32, _EXAMPLES),
        "samsum": DataSet("rouge_l_first_line", 128, _EXAMPLES),
        "lsht": DataSet("classification", 64, "仿照上面的例子，写出这条新闻的类别。\n\n{input}"),
        "passage_count": DataSet(
            "count",
            32,
            "How many different paragraphs are there, repeated ones counted once? Give only the number.",
        ),
        "passage_retrieval_en": DataSet(
            "retrieval",
            32,
            'Which paragraph is this a summary of? Answer in the form "Paragraph 1".\n\n{input}',
        ),
        "passage_retrieval_zh": DataSet(
            "retrieval_zh", 32, "下面的文字概括了哪一段？只回答编号，例如“段落1”。\n\n{input}"
        ),
        "lcc": DataSet("code_similarity", 64, _CODE),
        "repobench-p": DataSet("code_similarity", 64, _CODE),
    }
)
"""LongBench's data sets under its own names."""

_E = "_e"


def read_longbench(path: Path, chunker: Chunker, limit: int | None = None) -> Iterator[Sample]:
    """Yield the samples of a file, or of every .jsonl file below a folder; at most `limit` per file.

    A sample's task is its line's `dataset`, followed by `_e` in files of LongBench-E.

    Raises:
        InvalidRequest: no such file, a damaged line, or an unknown data set; says which and what to do.
    """
    for record in read_records(path, limit):
        name = record.text("dataset").removesuffix(_E)
        if name not in DATA_SETS:
            raise record.invalid(f"there is no data set {name!r} in LongBench ({', '.join(DATA_SETS)})")
        task = name + _E if record.path.stem.endswith(_E) else name
        data_set = DATA_SETS[name]
        yield Sample(
            name=record.name("longbench", task, chunker),
            task=task,
            chunks=record.chunks(record.text("context"), chunker),
            question=data_set.question.format(input=record.text("input")).strip(),
            answers=_answers(record, data_set.metric),
            metric=data_set.metric,
            max_new_tokens=data_set.max_new_tokens,
        )


def _answers(record: JsonRecord, metric: str) -> tuple[str, ...]:
    answers = record.texts("answers")
    return with_classes(answers, record.texts("all_classes")) if metric == "classification" else answers


@dataclass(frozen=True, slots=True)
class Form:
    """The template of one kind of RULER's tasks.

    Attributes:
        opening: the beginning of an input; besides it, only worked examples match.
        question: the beginning of the question, with any white space, since RULER can replace line ends.
        metric: the task's official metric.
        max_new_tokens: maximum length of an answer in RULER.
    """

    opening: Pattern[str]
    question: Pattern[str]
    metric: str
    max_new_tokens: int


FORMS = {
    "niah": Form(
        re.compile(r"(?:Some|A) special magic \w+ (?:are|is) hidden within"),
        re.compile(r"What (?:are all|is) the special magic \w+ for\s"),
        "string_match_all",
        128,
    ),
    "variable_tracking": Form(
        re.compile(r"Memorize and track the chain\(s\) of variable"),
        re.compile(r"Question: Find all variables that are assigned the value\s"),
        "string_match_all",
        30,
    ),
    "common_words_extraction": Form(
        re.compile(r"Below is a numbered list of words\."),
        re.compile(r"Question: What are the \d+ most common words in"),
        "string_match_all",
        120,
    ),
    "freq_words_extraction": Form(
        re.compile(r"Read the following coded text"),
        re.compile(r"Question: Do not provide any explanation\."),
        "string_match_all",
        50,
    ),
    "qa": Form(
        re.compile(r"Answer the question based on the given documents\."),
        re.compile(r"Answer the question based on the given documents\.[^\n?]{0,80}\s+Question:\s"),
        "string_match_part",
        32,
    ),
}
"""RULER's kinds of tasks under its own names."""

_SUBSETS = ("validation", "test")


def read_ruler(path: Path, chunker: Chunker, limit: int | None = None) -> Iterator[Sample]:
    """Yield the samples of a file, or of every .jsonl file below a folder; at most `limit` per file.

    The file names the task, or its folder does if the file is RULER's `validation.jsonl` or `test.jsonl`.

    Raises:
        InvalidRequest: no such file, or a line that is damaged or cannot be split; says which and what to do.
    """
    for record in read_records(path, limit):
        file = record.path.resolve()
        task = file.parent.name if file.stem in _SUBSETS else file.stem
        form, context, question = split_input(record)
        prefix = record.text("answer_prefix") if record.fields.get("answer_prefix") is not None else ""
        yield Sample(
            name=record.name("ruler", task, chunker),
            task=task,
            chunks=record.chunks(context, chunker),
            question=f"{question} {prefix.strip()}".strip(),
            answers=record.texts("outputs"),
            metric=form.metric,
            max_new_tokens=form.max_new_tokens,
        )


def split_input(record: JsonRecord) -> tuple[Form, str, str]:
    """Return the form of a line's input, the part before the question, and the question; raises InvalidRequest."""
    text = record.text("input").strip()
    form = next((form for form in FORMS.values() if form.opening.match(text)), None)
    if form is None:
        raise record.invalid(
            f"the input begins with {text[:40]!r}, which no task of RULER does ({', '.join(FORMS)})",
            "prepare the data with --model_template_type base: kvweave applies the model's own template",
        )
    begins = [match.span() for match in form.question.finditer(text)]
    if not begins or form.opening.search(text, begins[-1][1]):
        raise record.invalid(f"the input ends with {text[-40:]!r} and without the question of its task")
    return form, text[: begins[-1][0]].rstrip(), text[begins[-1][0] :]


READERS: Mapping[str, Callable[[Path, Chunker, int | None], Iterator[Sample]]] = MappingProxyType(
    {"ruler": read_ruler, "longbench": read_longbench}
)
"""Readers by name: a file or folder, how contexts are cut, and the most samples of each file (None: all)."""

NAMED_BY_FILE = frozenset({"ruler"})
"""Readers that name a task after its file. Files of one name have different lengths, which nothing in them says."""
