"""Benchmarks that long decoding is measured on, as their users have them on disk: MMLU, ARC, WritingPrompts, ShareGPT.

Questions with options become texts that the model writes by itself as far as is asked, and then has to answer in one
letter. Stories and conversations are decoded as they stand: nothing in them is right or wrong, what counts is what
dense decoding would say. Downloads nothing.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.prompt import ANSWER_LEAD, QUESTION_LEAD, SEPARATOR, PromptTemplate
from kvweave.types import Prompt
from kvweave_lab.eval.longtext.telling import LongText, Reply, spaces_by_itself
from kvweave_lab.eval.readers.records import FeatureExtractor, records

_LETTERS = "ABCDEFGH"
_CONCLUDING = "\n\nThe answer is"
_ASKING = "Think step by step, and then answer with a letter."


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a file: what is asked, what is decoded behind it, and the letter that answers it, where there is one."""

    prompt: str
    decoded: str = ""
    letter: str = ""


def read_long(
    kind: str, path: Path, template: PromptTemplate, limit: int, decode_tokens: int
) -> list[LongText]:
    """The first `limit` items of a file of a kind in LONG_READERS, as texts that go on for `decode_tokens` tokens.

    Conversations and stories that are shorter are as long as they are. A text's name says where it stands, and by a
    digest what it is: two files of one name, or a file that was edited, are told apart. Raises InvalidRequest for a file
    that cannot be read or is of another kind, saying where.
    """
    entries = islice(LONG_READERS[kind](path), limit)
    texts = [_text(kind, entry, template, decode_tokens) for entry in entries]
    return [
        replace(text, name=f"{kind}/{path.name}/{number}/{digest_tokens(text.token_ids)[:12]}")
        for number, text in enumerate(texts)
    ]


def _text(kind: str, entry: Entry, template: PromptTemplate, decode_tokens: int) -> LongText:
    """Without a name."""
    prompt = template.render(Prompt(entry.prompt, (), "")).token_ids
    if not entry.letter:
        return LongText("", kind, 0, (*prompt, *template.text_ids(entry.decoded)), len(prompt))
    lead = template.text_ids(_CONCLUDING)
    letter = template.text_ids(entry.letter if spaces_by_itself(template) else f" {entry.letter}")
    free = max(1, decode_tokens - len(lead) - len(letter))
    start = len(prompt) + len(lead)
    reply = Reply(start, start, start + len(letter), free)
    return LongText("", kind, 0, (*prompt, *lead, *letter), len(prompt), (reply,), free)


def _mmlu(path: Path) -> Iterator[Entry]:
    """MMLU's csv (question, four options, letter; no header), or lines of JSON with question, choices and answer."""
    if path.suffix == ".csv":
        with _opened(path) as lines:
            for number, row in enumerate(csv.reader(lines), 1):
                if len(row) != 6 or row[5].strip() not in tuple("ABCD"):
                    raise InvalidRequest(
                        f"{path}, line {number}: {len(row)} columns where question, four options and a letter from A to"
                        " D were expected; get the file anew"
                    )
                yield _choice(row[0], row[1:5], row[5].strip())
        return
    for record in records(path):
        answer = record.fields.get("answer")
        options = record.texts("choices")
        letter = _LETTERS[answer] if isinstance(answer, int) and 0 <= answer < len(options) else answer
        yield _choice(record.text("question"), options, _letter(record, letter, options))


def _arc(path: Path) -> Iterator[Entry]:
    """Lines of JSON with answerKey: the question with stem and choices, or beside text and label of the choices."""
    for record in records(path):
        asked: Any = record.fields.get("question")
        listed: Any = record.fields.get("choices")
        try:
            if isinstance(asked, dict):
                asked, listed = asked["stem"], asked["choices"]
                options = {str(one["label"]): str(one["text"]) for one in listed}
            else:
                options = dict(zip(map(str, listed["label"]), map(str, listed["text"]), strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise record.invalid(f"no question with choices ({error!r})") from error
        key = str(record.fields.get("answerKey"))
        if key not in options:
            raise record.invalid(f"answerKey is {key!r}, and the choices are {', '.join(options)}")
        texts = list(options.values())
        yield _choice(str(asked), texts, _letter(record, _LETTERS[list(options).index(key)], texts))


def _writing_prompts(path: Path) -> Iterator[Entry]:
    """`NAME.wp_source` with `NAME.wp_target` beside it, a prompt and its story per line, or JSON with prompt and story."""
    if path.suffix != ".wp_source":
        for record in records(path):
            yield Entry(record.text("prompt"), record.text("story"))
        return
    stories = path.with_suffix(".wp_target")
    with _opened(path) as asked, _opened(stories) as told:
        for prompt, story in zip(asked, told, strict=False):
            yield Entry(*(text.replace("<newline>", "\n").strip() for text in (prompt, story)))


def _sharegpt(path: Path) -> Iterator[Entry]:
    """A JSON list, or lines of JSON, of items with `conversations`: turns with `from` and `value`, a human's first."""
    for number, item in enumerate(_items(path), 1):
        try:
            turns = [(str(turn["from"]), str(turn["value"])) for turn in item["conversations"]]
        except (KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, item {number}: no conversation ({error!r}); remove it") from error
        while turns and turns[0][0] not in ("human", "user"):
            turns.pop(0)  # conversations that were cut begin in the middle
        if len(turns) > 1:
            yield Entry(turns[0][1], _conversation(turns[1:]))


def _conversation(turns: list[tuple[str, str]]) -> str:
    parts = [
        f"{SEPARATOR}{QUESTION_LEAD}{text}{ANSWER_LEAD}" if who in ("human", "user") else f" {text}"
        for who, text in turns
    ]
    return "".join(parts)


def _items(path: Path) -> Iterator[Any]:
    if path.suffix == ".jsonl":
        yield from (record.fields for record in records(path))
        return
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{path} cannot be read as JSON ({error}); name the data set's own file"
        ) from error
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} holds no list of conversations; name the data set's own file")
    yield from content


def _choice(question: str, options: "list[str] | tuple[str, ...]", letter: str) -> Entry:
    listed = "\n".join(f"{_LETTERS[number]}. {text}" for number, text in enumerate(options))
    return Entry(f"{question.strip()}\n{listed}\n{_ASKING}", letter=letter)


def _letter(record: FeatureExtractor, letter: object, options: "list[str] | tuple[str, ...]") -> str:
    """A letter that stands for one of the options; raises InvalidRequest."""
    if len(options) > len(_LETTERS) or letter not in tuple(_LETTERS[: len(options)]):
        raise record.invalid(f"the answer is {letter!r}, which is none of {len(options)} options")
    return str(letter)


def _opened(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); check the path") from error


LONG_READERS: Mapping[str, Callable[[Path], Iterator[Entry]]] = MappingProxyType(
    {"mmlu": _mmlu, "arc": _arc, "writingprompts": _writing_prompts, "sharegpt": _sharegpt}
)
"""Readers by the name of what a file is shaped like."""
