"""Reads local files of MMLU, ARC, WritingPrompts and ShareGPT as long texts. Downloads nothing.

For a question with options, the model writes freely first and then has to answer with one letter. Stories and
conversations are decoded as given: no answer is judged there, and decoding is compared with dense decoding.
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
from kvweave_lab.eval.long_texts import LongText, Reply, adds_leading_space
from kvweave_lab.eval.readers import JsonRecord, read_records

_LETTERS = "ABCDEFGH"
_CONCLUSION = "\n\nThe answer is"
_INSTRUCTION = "Think step by step, and then answer with a letter."


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a file: the prompt, the text decoded after it, and the correct letter if there is one."""

    prompt: str
    decoded: str = ""
    letter: str = ""


def read_long(
    kind: str, path: Path, template: PromptTemplate, limit: int, decode_tokens: int
) -> list[LongText]:
    """Return the first `limit` items of a file as texts of `decode_tokens` tokens after the prompt.

    `kind` is a key of LONG_READERS. Conversations and stories that are shorter keep their length. A text's name holds
    its place in the file and a digest, so that two files of one name, or an edited file, get different names. Raises
    InvalidRequest, with the place, for a file that cannot be read or is of another kind.
    """
    items = islice(LONG_READERS[kind](path), limit)
    texts = [_text(kind, item, template, decode_tokens) for item in items]
    return [
        replace(text, name=f"{kind}/{path.name}/{number}/{digest_tokens(text.token_ids)[:12]}")
        for number, text in enumerate(texts)
    ]


def _text(kind: str, item: Item, template: PromptTemplate, decode_tokens: int) -> LongText:
    """Return the text of an item, without a name."""
    prompt = template.render(Prompt(item.prompt, (), "")).token_ids
    if not item.letter:
        return LongText("", kind, 0, (*prompt, *template.tokenize(item.decoded)), len(prompt))
    lead = template.tokenize(_CONCLUSION)
    letter = template.tokenize(item.letter if adds_leading_space(template) else f" {item.letter}")
    free = max(1, decode_tokens - len(lead) - len(letter))
    start = len(prompt) + len(lead)
    reply = Reply(start, start, start + len(letter), free)
    return LongText("", kind, 0, (*prompt, *lead, *letter), len(prompt), (reply,), free)


def _mmlu(path: Path) -> Iterator[Item]:
    """Read MMLU's csv (question, four options, letter; no header), or jsonl with question, choices and answer."""
    if path.suffix == ".csv":
        with _open(path) as lines:
            for number, row in enumerate(csv.reader(lines), 1):
                if len(row) != 6 or row[5].strip() not in tuple("ABCD"):
                    raise InvalidRequest(
                        f"{path}, line {number}: {len(row)} columns where question, four options and a letter from A to"
                        " D were expected; download the file again"
                    )
                yield _choice(row[0], row[1:5], row[5].strip())
        return
    for record in read_records(path):
        answer = record.fields.get("answer")
        options = record.texts("choices")
        letter = _LETTERS[answer] if isinstance(answer, int) and 0 <= answer < len(options) else answer
        yield _choice(record.text("question"), options, _letter(record, letter, options))


def _arc(path: Path) -> Iterator[Item]:
    """Read jsonl with answerKey; the question has stem and choices, or the choices have lists text and label."""
    for record in read_records(path):
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


def _writing_prompts(path: Path) -> Iterator[Item]:
    """Read `NAME.wp_source` and `NAME.wp_target`, one prompt and one story per line, or jsonl with prompt and story."""
    if path.suffix != ".wp_source":
        for record in read_records(path):
            yield Item(record.text("prompt"), record.text("story"))
        return
    stories = path.with_suffix(".wp_target")
    with _open(path) as prompts, _open(stories) as answers:
        for prompt, story in zip(prompts, answers, strict=False):
            yield Item(*(text.replace("<newline>", "\n").strip() for text in (prompt, story)))


def _sharegpt(path: Path) -> Iterator[Item]:
    """Read a JSON list or jsonl of items with `conversations`: turns with `from` and `value`, a human's first."""
    for number, item in enumerate(_items(path), 1):
        try:
            turns = [(str(turn["from"]), str(turn["value"])) for turn in item["conversations"]]
        except (KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, item {number}: no conversation ({error!r}); remove it") from error
        while turns and turns[0][0] not in ("human", "user"):
            turns.pop(0)  # truncated conversations begin in the middle
        if len(turns) > 1:
            yield Item(turns[0][1], _conversation(turns[1:]))


def _conversation(turns: list[tuple[str, str]]) -> str:
    parts = [
        f"{SEPARATOR}{QUESTION_LEAD}{text}{ANSWER_LEAD}" if who in ("human", "user") else f" {text}"
        for who, text in turns
    ]
    return "".join(parts)


def _items(path: Path) -> Iterator[Any]:
    if path.suffix == ".jsonl":
        yield from (record.fields for record in read_records(path))
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


def _choice(question: str, options: "list[str] | tuple[str, ...]", letter: str) -> Item:
    listed = "\n".join(f"{_LETTERS[number]}. {text}" for number, text in enumerate(options))
    return Item(f"{question.strip()}\n{listed}\n{_INSTRUCTION}", letter=letter)


def _letter(record: JsonRecord, letter: object, options: "list[str] | tuple[str, ...]") -> str:
    """Return a letter that names one of the options; raise InvalidRequest otherwise."""
    if len(options) > len(_LETTERS) or letter not in tuple(_LETTERS[: len(options)]):
        raise record.invalid(f"the answer is {letter!r}, which is none of {len(options)} options")
    return str(letter)


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); check the path") from error


LONG_READERS: Mapping[str, Callable[[Path], Iterator[Item]]] = MappingProxyType(
    {"mmlu": _mmlu, "arc": _arc, "writingprompts": _writing_prompts, "sharegpt": _sharegpt}
)
"""Readers by the format of a file."""
