"""RULER's own prepared data: the jsonl files that its `prepare.py` writes, one per task and length.

A line's `input` is one string, an opening, the context and a question, each in the words of the task's template.
The opening tells the task's form; the last place where the form's question begins splits the string. All before it
(the opening, worked examples and the context, as RULER has them) is cut into chunks; the question, and behind it the
`answer_prefix` where the line has one, is what is asked. Joined, that is the prompt of RULER's own script, but for
white space between the parts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import Pattern

from kvweave.index.chunking import Chunker
from kvweave_lab.eval.readers.records import FeatureExtractor, records
from kvweave_lab.eval.samples import Sample


@dataclass(frozen=True, slots=True)
class Form:
    """What the inputs of one kind of task look like.

    Attributes:
        opening: how they begin, and nothing else in them but worked examples.
        question: how the question begins; white space may be any, since RULER can replace line ends.
        metric: the task's official metric.
        max_new_tokens: how many tokens RULER lets it generate.
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


def read(path: Path, chunker: Chunker, limit: int | None = None) -> Iterator[Sample]:
    """Samples of a file, or of every .jsonl file below a folder; at most `limit` per file.

    The task is named by the file, or by its folder where the file is RULER's `validation.jsonl` or `test.jsonl`.

    Raises:
        InvalidRequest: no such file, or a line that is damaged or cannot be split; says which and what to do.
    """
    for record in records(path, limit):
        file = record.path.resolve()
        task = file.parent.name if file.stem in _SUBSETS else file.stem
        form, context, question = split(record)
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


def split(record: FeatureExtractor) -> tuple[Form, str, str]:
    """The form of a line's input, its part before the question, and the question; raises InvalidRequest."""
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
