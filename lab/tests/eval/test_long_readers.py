"""Local files in the formats of MMLU, ARC, WritingPrompts and ShareGPT."""

import json

import pytest

from kvweave.errors import InvalidRequest
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.long_readers import read_long

TEMPLATE = PromptTemplate(tiny_tokenizer())
STEM = "Which planet is the largest?"
OPTIONS = ["Mars", "Jupiter", "Venus", "Earth"]


def lines(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def mmlu_csv(folder):
    (folder / "astronomy.csv").write_text(f'"{STEM}",Mars,Jupiter,Venus,Earth,B\n')
    return "mmlu", folder / "astronomy.csv"


def mmlu_json(folder):
    return "mmlu", lines(folder / "m.jsonl", {"question": STEM, "choices": OPTIONS, "answer": 1})


def arc_stem(folder):
    choices = [{"text": text, "label": label} for text, label in zip(OPTIONS, "1234", strict=True)]
    item = {"question": {"stem": STEM, "choices": choices}, "answerKey": "2"}
    return "arc", lines(folder / "a.jsonl", item)


def arc_columns(folder):
    choices = {"text": OPTIONS, "label": list("ABCD")}
    return "arc", lines(folder / "a.jsonl", {"question": STEM, "choices": choices, "answerKey": "B"})


@pytest.mark.parametrize("write", [mmlu_csv, mmlu_json, arc_stem, arc_columns])
def test_the_answers_letter_follows_freely_decoded_tokens(tmp_path, write):
    kind, path = write(tmp_path)
    (text,) = read_long(kind, path, TEMPLATE, 5, 100)
    prompt = TEMPLATE.decode(text.token_ids[: text.prompt_tokens])
    assert STEM in prompt
    assert "B. Jupiter\nC. Venus" in prompt
    (reply,) = text.replies
    assert TEMPLATE.decode(text.token_ids[reply.value_start : reply.end]) == " B"
    assert text.decode_tokens == 100
    assert text.free_tokens == 100 - (len(text.token_ids) - text.prompt_tokens)
    assert TEMPLATE.decode(text.token_ids[text.prompt_tokens : reply.start]) == "\n\nThe answer is"


def test_texts_of_different_files_have_different_names(tmp_path):
    names = []
    for folder, largest in (("a", "Jupiter"), ("b", "Saturn"), ("a", "Jupiter"), ("a", "Neptune")):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / "test.csv"
        path.write_text(f'"{STEM}",Mars,{largest},Venus,Earth,B\n')
        names += [text.name for text in read_long("mmlu", path, TEMPLATE, 5, 100)]
    assert names[0] == names[2]
    assert len(set(names)) == 3
    assert all(name.startswith("mmlu/test.csv/0/") for name in names)


def test_stories_are_read_with_their_prompts(tmp_path):
    (tmp_path / "valid.wp_source").write_text("[ WP ] A lamp talks .\n[ WP ] Two .\n")
    (tmp_path / "valid.wp_target").write_text("It began . <newline> Then more .\nOther .\n")
    (text,) = read_long("writingprompts", tmp_path / "valid.wp_source", TEMPLATE, 1, 10)
    assert "A lamp talks" in TEMPLATE.decode(text.token_ids[: text.prompt_tokens])
    assert TEMPLATE.decode(text.token_ids[text.prompt_tokens :]) == "It began . \n Then more ."
    assert text.replies == ()


def test_conversations_begin_with_their_first_question(tmp_path):
    turns = [("gpt", "cut off"), ("human", "Who?"), ("gpt", "She."), ("human", "When?"), ("gpt", "Now.")]
    item = {"id": "x", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    (tmp_path / "share.json").write_text(json.dumps([item]))
    (text,) = read_long("sharegpt", tmp_path / "share.json", TEMPLATE, 5, 10)
    assert "Who?" in TEMPLATE.decode(text.token_ids[: text.prompt_tokens])
    assert TEMPLATE.decode(text.token_ids[text.prompt_tokens :]) == " She.\n\nQuestion: When? Answer: Now."


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("mmlu", '{"question": "q", "choices": ["a", "b"], "answer": 2}', "none of 2 options"),
        ("arc", '{"question": "q", "answerKey": "A"}', "no question with choices"),
        (
            "arc",
            '{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "C"}',
            "answerKey is 'C'",
        ),
        ("writingprompts", '{"prompt": "p"}', "'story' is missing"),
        ("sharegpt", '{"id": 3}', "no conversation"),
    ],
)
def test_other_content_is_refused(tmp_path, kind, content, message):
    path = tmp_path / "given.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(InvalidRequest, match=message):
        read_long(kind, path, TEMPLATE, 5, 10)
