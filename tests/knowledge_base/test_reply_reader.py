"""Reading a reply: its thoughts, its line, and what may be shown while it grows; with tokens that hold several things."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.answering.reply_reader import ReplyReader
from kvweave.testing import tiny_tokenizer
from kvweave.types import ReplyFormat, ThoughtTags

WIDE = [
    ".\n",
    "a\nb",
    "\n\n",
    " \n",
    ". Question",
    "Question:",
    ":",
    "\r\n",
    "<think>\n",
    "e</think>f",
    "n</th",
    "ink> ",
]
TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens(WIDE)
SPECIAL = tiny_tokenizer()
SPECIAL.add_tokens(["<think>", "</think>"], special_tokens=True)
ONE_LINE = ReplyFormat(one_line=True)


def ids_of(*pieces, tokenizer=TOKENIZER):
    """Return the ids of pieces; those in WIDE are one token."""
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def read(form, *pieces, tokenizer=TOKENIZER, stopped=None):
    return ReplyReader(tokenizer, form).read(ids_of(*pieces, tokenizer=tokenizer), stopped=stopped)


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([" Paris", ".\n"], " Paris."),  # the end of the line within a token
        ([" P", "a\nb"], " Pa"),
        ([" Paris.", "\n\n", "Question:"], " Paris."),
        (["\n\n", " Paris", "\n"], "\n\n Paris"),  # leading lines end nothing
        (["\n\n", "Question:"], ""),
        ([" Paris", ". Question", ":", " Who?"], " Paris."),
        ([" Question: Who?"], ""),
        ([" Paris", " \n"], " Paris"),
        ([" A", "\r\n"], " A"),
        ([" A\u2028B"], " A"),
        ([' The heading "Question: why" is bold.\n'], ' The heading "Question: why" is bold.'),
    ],
)
def test_an_answer_of_one_line_ends_with_it(pieces, answer):
    got = read(ONE_LINE, *pieces)
    assert (got.answer, got.ready, got.ended) == (answer, answer, True)
    decode = TOKENIZER.decode
    assert decode(got.ids, skip_special_tokens=True).startswith(answer)
    assert not got.ids or not decode(got.ids[:-1], skip_special_tokens=True).startswith(
        answer
    )  # no token too many


@pytest.mark.parametrize(
    ("pieces", "ready"),
    [
        ([" Paris"], " Paris"),
        ([" Paris "], " Paris"),
        ([" Paris. Q"], " Paris."),
        ([" Paris", ". Question"], " Paris."),
        ([" Quite"], " Quite"),
        ([" Paris-Q"], " Paris-Q"),  # no other question begins inside a word
        (["\n\n"], ""),
        (["Q"], ""),
    ],
)
def test_what_may_be_the_end_of_a_line_is_held_back(pieces, ready):
    got = read(ONE_LINE, *pieces)
    assert (got.answer, got.ready, got.ended) == ("".join(pieces), ready, False)


def test_several_lines_are_read_to_their_end():
    got = read(ReplyFormat(), "One.\nQuestion: Two?\n")
    assert (got.answer, got.ready, got.ended) == ("One.\nQuestion: Two?\n", "One.\nQuestion: Two?\n", False)


THOUGHT = "<think>\nBy the note, it is Ann.\n</think>\n\nAnn."


class TestThoughts:
    @pytest.mark.parametrize("mode", ["tagged", "opened", "unmarked"])
    @pytest.mark.parametrize("tokenizer", [TOKENIZER, SPECIAL])
    @pytest.mark.parametrize("one_line", [False, True])
    def test_they_are_kept_apart_from_the_answer(self, mode, tokenizer, one_line):
        closing = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>")]
        tags = (
            ThoughtTags(opening_id=closing[0], closing_id=closing[1])
            if tokenizer is SPECIAL
            else ThoughtTags()
        )
        form = ReplyFormat(one_line, mode, tags)
        texts = [THOUGHT] if mode == "tagged" else [THOUGHT, THOUGHT.removeprefix("<think>")]
        for text in texts:
            got = read(form, text, tokenizer=tokenizer, stopped=True)
            assert (got.answer, got.thoughts, got.thinking) == ("Ann.", "By the note, it is Ann.", False)
            shown = ""
            ids = ids_of(text, tokenizer=tokenizer)
            for count in range(len(ids) + 1):
                ready = ReplyReader(tokenizer, form).read(ids[:count]).ready
                assert ready.startswith(shown)
                shown = ready
            assert shown == "Ann."

    def test_a_tag_may_be_split_among_tokens(self):
        got = read(ReplyFormat(), "<think>\n", "a", "n</th", "ink> ", "Ann.")
        assert (got.answer, got.thoughts) == ("Ann.", "an")
        assert read(ReplyFormat(), "<think>\n", "e</think>f").answer == "f"

    @pytest.mark.parametrize("stopped", [None, True, False])
    def test_unfinished_thoughts_are_no_answer(self, stopped):
        for mode, text in (
            ("tagged", "<think>\nBy the"),
            ("opened", "By the"),
            ("unmarked", "<think>By the"),
        ):
            got = read(ReplyFormat(thoughts=mode), text, stopped=stopped)
            assert (got.answer, got.ready, got.thoughts, got.thinking) == ("", "", "By the", True)

    def test_a_reply_without_any_tag_is_an_answer_once_the_model_ended_it(self):
        form = ReplyFormat(thoughts="unmarked")
        assert read(form, "Ann.").ready == ""
        assert read(form, "Ann.", stopped=True).answer == "Ann."
        cut = read(form, "Ann.", stopped=False)
        assert (cut.answer, cut.thinking) == ("", True)

    def test_a_tag_inside_an_answer_is_text(self):
        text = "Write <think> and </think>."
        assert read(ReplyFormat(), text, stopped=True).answer == text
        assert read(ReplyFormat(), "<think>x</think>" + text, stopped=True).answer == text

    def test_the_start_of_a_tag_is_held_back(self):
        assert read(ReplyFormat(), " <thi").ready == ""
        assert read(ReplyFormat(), " <this").ready == " <this"
        assert read(ReplyFormat(), "a <thi").ready == "a <thi"

    def test_the_line_of_an_answer_starts_after_its_thoughts(self):
        got = read(ONE_LINE, "<think>a\nb</think>\n\nAnn", ".\n", "Question:")
        assert (got.answer, got.thoughts, got.ended) == ("Ann.", "a\nb", True)
        assert TOKENIZER.decode(got.ids) == "<think>a\nb</think>\n\nAnn.\n"


def first_line(text):
    """Return the first line that holds any text, by a rule of its own, up to another question."""
    lines = re.split(r"[\n\r\v\f\x85\u2028\u2029]", text.lstrip())
    line = lines[0]
    for found in re.finditer("Question:", line):
        if found.start() == 0 or line[found.start() - 1].isspace():
            return line[: found.start()].rstrip()
    return line.rstrip()


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([*WIDE, " ", "a", "Q", "uestion", "\n", "é", "\U0001f600", " the"]), max_size=8)
)
def test_any_tokens_give_the_first_line_and_what_was_shown_stays(pieces):
    ids = ids_of(*pieces)
    reader, shown = ReplyReader(TOKENIZER, ONE_LINE), ""
    for count in range(len(ids) + 1):
        got = reader.read(ids[:count])
        if got.thinking:
            return
        assert got.ready.startswith(shown)
        shown = got.ready
        if got.ended:
            break
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert got.answer.strip() == first_line(text) or not got.ended
    assert got.ended == (bool(re.search(r"[\n\r\v\f\x85\u2028\u2029]|(?<!\S)Question:", text.lstrip())))
    assert TOKENIZER.decode(got.ids, skip_special_tokens=True).startswith(got.answer)
