"""Users read from local files in the formats of EnronQA and MISeD."""

import json

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.personas.users import read_enronqa, read_mised


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def email(user, text, *pairs):
    return {
        "user": user,
        "email": text,
        "questions": [question for question, _ in pairs],
        "gold_answers": [answer for _, answer in pairs],
    }


def test_an_inbox_is_a_user_with_questions_of_each_email_in_turn(tmp_path):
    path = written(
        tmp_path / "emails.jsonl",
        email("kay", "First.", ("one?", "1"), ("two?", "2")),
        email("lou", "Other.", ("which?", "that")),
        email("kay", "Second.", ("three?", "3")),
    )
    kay, lou = read_enronqa(path, users=5, questions=5)
    assert (kay.name, kay.kind, lou.name) == ("kay", "email", "lou")
    assert [note.text for note in kay.notes] == ["First.", "Second."]
    assert [(asked.text, asked.answers) for asked in kay.questions] == [
        ("one?", ("1",)),
        ("three?", ("3",)),
        ("two?", ("2",)),
    ]
    assert len({asked.fact for asked in kay.questions}) == 3


def test_no_more_users_and_questions_are_read_than_requested(tmp_path):
    lines = [email(user, f"Text {n}.", (f"{n}?", "a")) for user in "abc" for n in range(4)]
    users = read_enronqa(written(tmp_path / "emails.jsonl", *lines), users=2, questions=3)
    assert [user.name for user in users] == ["a", "b"]
    assert all(len(user.notes) == len(user.questions) == 3 for user in users)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gold_answers": ["1", "2"]}, "1 questions and 2 answers"),
        ({"user": 3}, "'user'"),
        ({"questions": []}, "'questions'"),
    ],
)
def test_a_line_that_is_no_email_is_refused_with_its_number(tmp_path, change, said):
    path = written(tmp_path / "emails.jsonl", email("kay", "Text.", ("one?", "1")) | change)
    with pytest.raises(InvalidRequest, match=said) as caught:
        read_enronqa(path, users=1, questions=1)
    assert "line 1" in str(caught.value)


def meeting(segments, turns):
    return {
        "meeting": {"transcriptSegments": [{"speakerName": who, "text": text} for who, text in segments]},
        "dialog": {"dialogTurns": [{"query": query, "response": answer} for query, answer in turns]},
    }


def test_a_dialog_is_a_user_with_the_transcript_split_into_notes(tmp_path):
    spoken = [("Ann", f"Sentence {number}.") for number in range(45)]
    path = written(tmp_path / "dev.jsonl", meeting(spoken, [("Who spoke?", "Ann."), ("When?", "Now.")]))
    (user,) = read_mised(path, users=3, questions=1)
    assert (user.name, user.kind, len(user.notes)) == ("dev-0001", "meeting", 3)
    assert user.notes[0].text.splitlines()[:2] == ["Ann: Sentence 0.", "Ann: Sentence 1."]
    assert sum(len(note.text.splitlines()) for note in user.notes) == 45
    assert [(asked.text, asked.answers) for asked in user.questions] == [("Who spoke?", ("Ann.",))]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"dialog": {"dialogTurns": [{"query": "q", "response": "r"}]}}, "transcriptSegments"),
        (meeting([("Ann", "Hello.")], []), "dialogTurns"),
        (meeting([("Ann", 3)], [("q", "r")]), "'text'"),
    ],
)
def test_a_line_that_is_no_dialog_is_refused(tmp_path, line, said):
    with pytest.raises(InvalidRequest, match=said):
        read_mised(written(tmp_path / "dev.jsonl", line), users=1, questions=1)


def test_an_empty_file_is_refused(tmp_path):
    empty = written(tmp_path / "empty.jsonl")
    for read in (read_enronqa, read_mised):
        with pytest.raises(InvalidRequest, match="holds no"):
            read(empty, users=1, questions=1)
