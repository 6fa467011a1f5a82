"""EnronQA's lines as users: every inbox its emails and the questions about them. The data is not part of kvweave.

A line is an email with the fields `user`, `email`, `questions` and `gold_answers`, the last two lists of equal length.
"""

from itertools import chain, zip_longest
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.personas.people import Asked, Note, User
from kvweave_lab.eval.readers.records import FeatureExtractor, records


def read_enronqa(path: Path, users: int, questions: int) -> list[User]:
    """The first so many inboxes of a .jsonl file, each with its first emails and so many questions about them.

    As many emails are taken as questions: the first question of each of them, then the second of each, and so on. Raises
    InvalidRequest for a file without usable lines.
    """
    inboxes: dict[str, list[FeatureExtractor]] = {}
    for record in records(path):
        of = inboxes.setdefault(record.text("user"), [])
        if len(of) < questions:
            of.append(record)
    found = [_user(name, emails, questions) for name, emails in list(inboxes.items())[:users]]
    if not found:
        raise InvalidRequest(f"{path} holds no email; name EnronQA's .jsonl file")
    return found


def _user(name: str, emails: list[FeatureExtractor], questions: int) -> User:
    notes = tuple(Note(f"{name}-{number:04}.txt", email.text("email")) for number, email in enumerate(emails))
    by_turns = chain.from_iterable(zip_longest(*(_asked(email) for email in emails)))
    asked = [each for each in by_turns if each is not None]
    return User(name, "email", notes, tuple(asked[:questions]))


def _asked(email: FeatureExtractor) -> list[Asked]:
    texts, answers = email.texts("questions"), email.texts("gold_answers")
    if len(texts) != len(answers):
        raise email.invalid(f"it has {len(texts)} questions and {len(answers)} answers")
    return [
        Asked(text, (answer,), f"{email.digest} {number}")
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True))
    ]
