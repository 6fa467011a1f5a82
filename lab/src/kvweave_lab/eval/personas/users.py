"""Users with notes and questions in order: generated from a seed, or read from EnronQA's and MISeD's files.

Questions of a generated user are sparse and varied. Most ask for a new fact, in one of the user's own phrasings. Some ask
for an earlier fact again, half of them in other words. Most are about a few favourite notes. Knows nothing of models,
caches or chunks.
"""

import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.readers import JsonRecord, read_records
from kvweave_lab.eval.tasks import needles as attributes
from kvweave_lab.eval.world import DEV, TEST, Haystack, World

POOLS: Final = (DEV, TEST)

Kind: TypeAlias = Literal["email", "meeting", "dialogue"]
KINDS: Final[tuple[Kind, ...]] = ("email", "meeting", "dialogue")
"""Kinds of notes: messages, minutes, and transcripts of a day."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around the facts of a note of one kind: title, first and last sentence."""

    heading: Sequence[str]
    opening: Sequence[str]
    closing: Sequence[str]

    @property
    def phrasings(self) -> tuple[str, ...]:
        """All texts, placeholders unfilled."""
        return (*self.heading, *self.opening, *self.closing)


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one kind.

    Attributes:
        name: of the family.
        stated: by kind of notes, the sentences that state a fact, one or two at a time.
        asked: questions for the fact, all with the same meaning.
        attributes: name of the list in `eval.tasks.needles` that fills {a}; empty if there is no {a}.
        reply: the whole answer as the reference model gives it; empty for the value alone.
    """

    name: str
    stated: Mapping[str, Sequence[str]]
    asked: Sequence[str]
    attributes: str = ""
    reply: str = ""

    @property
    def phrasings(self) -> tuple[str, ...]:
        """All texts, placeholders unfilled."""
        return (*(text for texts in self.stated.values() for text in texts), *self.asked)


@dataclass(frozen=True, slots=True)
class Pool:
    """The frames by kind and the families of a split."""

    frames: Mapping[str, Frame]
    families: tuple[Family, ...]


@cache
def load_pool(split: str) -> Pool:
    """Return the pool of a split; raise InvalidRequest if it has none. Splits share no phrasing."""
    if split not in POOLS:
        raise InvalidRequest(
            f"there are no generated users for split {split!r}; choose one of {', '.join(POOLS)}"
        )
    content = tomllib.loads((resources.files(__package__) / f"{split}.toml").read_text("utf-8"))
    frames = {kind: Frame(**frame) for kind, frame in content["frame"].items()}
    assert tuple(frames) == KINDS, split
    return Pool(frames, tuple(Family(**family) for family in content["family"]))


NOTES: Final = 10
"""Notes per user."""

_FACTS: Final = 3  # per note
_NATURAL: Final = 1  # natural sentences before each fact, so that a note is about as long as a chunk
_NUMBER_DIGITS: Final = 5
_WEIGHTS: Final = {"number": 5, "word": 2, "treasure": 2, "order": 2, "town": 2, "owns": 2, "host": 1}
_REPEATED: Final = 0.25  # share of questions that ask for an earlier fact …
_SAME_WORDS: Final = 0.5  # … and of these, share in the same words
_USUAL: Final = 0.7  # share of questions in the user's usual phrasing


@dataclass(frozen=True, slots=True)
class Note:
    """A document of a user."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a user.

    Attributes:
        text: as it is asked.
        answers: reference answers, any of which is right.
        fact: identifies what it asks for: questions with the same fact have the same answer.
    """

    text: str
    answers: tuple[str, ...]
    fact: str


@dataclass(frozen=True, slots=True)
class User:
    """A user with notes of one kind, and questions in order."""

    name: str
    kind: str
    notes: tuple[Note, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Fact:
    family: Family
    values: dict[str, str]
    stated: str
    note: int

    @property
    def answer(self) -> str:
        value = self.values.get("n") or self.values["v"]
        return self.family.reply.format(**self.values) if self.family.reply else value

    @property
    def key(self) -> str:
        return f"{self.family.name} {' '.join(self.values.values())}"


def make_users(split: str, count: int, questions: int, seed: int) -> list[User]:
    """Generate users of all kinds in turn; equal arguments give equal users.

    A smaller count gives the first of the same users. Raises InvalidRequest for a split without a pool.
    """
    pool, haystack = load_pool(split), Haystack.of_split(split)
    return [_generated_user(number, questions, seed, split, pool, haystack) for number in range(count)]


def _generated_user(
    number: int, questions: int, seed: int, split: str, pool: Pool, haystack: Haystack
) -> User:
    rng = random.Random(f"{split} {seed} {number}")
    kind = KINDS[number % len(KINDS)]
    world = World(rng, split)
    facts = _draw_facts(world, kind, pool)
    natural_sentences = haystack.without(
        [fact.values[slot] for fact in facts for slot in fact.values if slot != "a"]
    )
    notes = tuple(_write_note(world, kind, pool, place, facts, natural_sentences) for place in range(NOTES))
    asked = _draw_questions(rng, facts, questions)
    return User(f"{kind}-{seed}-{number}", kind, notes, tuple(asked))


def _draw_facts(world: World, kind: str, pool: Pool) -> list[_Fact]:
    rng = world.rng
    unused = {
        name: rng.sample(listed, len(listed))
        for name in ("NUMBERS", "WORDS")
        for listed in [getattr(attributes, name)]
    }
    weights = [_WEIGHTS[family.name] for family in pool.families]
    facts = []
    for place in range(NOTES * _FACTS):
        family = rng.choices(pool.families, weights)[0]
        stated = rng.choice(list(family.stated[kind]))
        values = _draw_values(world, family, unused)
        facts.append(
            _Fact(family, values, stated.format(**values, s=rng.choice(("He", "She"))), place // _FACTS)
        )
    return facts


def _draw_values(world: World, family: Family, unused: dict[str, list[str]]) -> dict[str, str]:
    """Draw a value for every placeholder of a family; attributes repeat only after all were used."""
    phrasings = " ".join(family.phrasings)
    values = {}
    if family.attributes:
        left = unused[family.attributes]
        if not left:
            listed: Sequence[str] = getattr(attributes, family.attributes)
            left.extend(world.rng.sample(listed, len(listed)))
        values["a"] = left.pop()
    drawn: dict[str, Callable[[], str]] = {
        "k": world.person,
        "q": world.person,
        "t": world.town,
        "v": world.thing,
        "u": world.thing,
        "n": lambda: world.number(_NUMBER_DIGITS),
    }
    return values | {slot: draw() for slot, draw in drawn.items() if f"{{{slot}}}" in phrasings}


def _write_note(
    world: World, kind: str, pool: Pool, place: int, facts: Sequence[_Fact], natural_sentences: Sequence[str]
) -> Note:
    rng, frame = world.rng, pool.frames[kind]
    about = {"k": world.person(), "w": rng.choice(_TOPICS), "a": "news"}
    start = rng.randrange(len(natural_sentences))
    natural = [
        natural_sentences[(start + number) % len(natural_sentences)] for number in range(_FACTS * _NATURAL)
    ]
    paragraphs = [rng.choice(list(frame.opening)).format(**about)]
    for number, fact in enumerate(fact for fact in facts if fact.note == place):
        before = natural[_NATURAL * number : _NATURAL * (number + 1)]
        paragraphs.append(" ".join((*before, fact.stated)))
    paragraphs.append(rng.choice(list(frame.closing)).format(**about))
    heading = rng.choice(list(frame.heading)).format(**about)
    return Note(f"{kind}-{place:02}.txt", "\n\n".join((heading, *paragraphs)) + "\n")


def _draw_questions(rng: random.Random, facts: Sequence[_Fact], count: int) -> list[Question]:
    favourites = rng.sample(range(NOTES), NOTES)  # most asked about first
    weights = [1 / (1 + favourites.index(fact.note)) for fact in facts]
    habits = {fact.family.name: rng.randrange(len(fact.family.asked)) for fact in facts}
    asked: list[tuple[_Fact, str]] = []
    for _ in range(count):
        if asked and rng.random() < _REPEATED:
            fact, words = rng.choice(asked)
            if rng.random() >= _SAME_WORDS:
                words = rng.choice([other for other in fact.family.asked if other != words])
        else:
            new = [place for place, fact in enumerate(facts) if all(fact is not old for old, _ in asked)]
            fact = facts[_draw_weighted(rng, new or list(range(len(facts))), weights)]
            usual = fact.family.asked[habits[fact.family.name]]
            words = usual if rng.random() < _USUAL else rng.choice(list(fact.family.asked))
        asked.append((fact, words))
    return [Question(words.format(**fact.values), (fact.answer,), fact.key) for fact, words in asked]


def _draw_weighted(rng: random.Random, places: Sequence[int], weights: Sequence[float]) -> int:
    return rng.choices(places, cum_weights=list(accumulate(weights[place] for place in places)))[0]


_TOPICS: Final = (
    "garden budget concert office summer market library kitchen harbour workshop school festival".split()
)


def read_enronqa(path: Path, users: int, questions: int) -> list[User]:
    """Return the first inboxes of EnronQA's .jsonl file as users, each with its first emails and questions about them.

    A line is an email with `user`, `email`, `questions` and `gold_answers`, the last two lists of equal length. A user
    gets as many emails as questions: first each email's first question, then each one's second, and so on. Raises
    InvalidRequest for a file without usable lines.
    """
    inboxes: dict[str, list[JsonRecord]] = {}
    for record in read_records(path):
        emails = inboxes.setdefault(record.text("user"), [])
        if len(emails) < questions:
            emails.append(record)
    found = [_inbox_user(name, emails, questions) for name, emails in list(inboxes.items())[:users]]
    if not found:
        raise InvalidRequest(f"{path} holds no email; name EnronQA's .jsonl file")
    return found


def _inbox_user(name: str, emails: list[JsonRecord], questions: int) -> User:
    notes = tuple(Note(f"{name}-{number:04}.txt", email.text("email")) for number, email in enumerate(emails))
    in_turn = chain.from_iterable(zip_longest(*(_email_questions(email) for email in emails)))
    asked = [each for each in in_turn if each is not None]
    return User(name, "email", notes, tuple(asked[:questions]))


def _email_questions(email: JsonRecord) -> list[Question]:
    texts, answers = email.texts("questions"), email.texts("gold_answers")
    if len(texts) != len(answers):
        raise email.invalid(f"it has {len(texts)} questions and {len(answers)} answers")
    return [
        Question(text, (answer,), f"{email.digest} {number}")
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True))
    ]


_SEGMENTS: Final = 20
"""Transcript segments per note."""


def read_mised(path: Path, users: int, questions: int) -> list[User]:
    """Return the first dialogs of MISeD's .jsonl file as users: a meeting's transcript, and questions about it.

    A line holds `meeting`, with `transcriptSegments` of `speakerName` and `text`, and `dialog`, with `dialogTurns` of
    `query` and `response`. Several lines about one meeting are several users. Raises InvalidRequest for a file without
    usable lines.
    """
    found = [_dialog_user(record, questions) for record in islice(read_records(path), users)]
    if not found:
        raise InvalidRequest(f"{path} holds no dialog; name MISeD's .jsonl file")
    return found


def _dialog_user(record: JsonRecord, questions: int) -> User:
    lines = [
        f"{_text(record, segment, 'speakerName')}: {_text(record, segment, 'text')}"
        for segment in _listed(record, "meeting", "transcriptSegments")
    ]
    name = f"{record.path.stem}-{record.line:04}"
    notes = tuple(
        Note(f"{name}-{start:05}.txt", "\n".join(lines[start : start + _SEGMENTS]))
        for start in range(0, len(lines), _SEGMENTS)
    )
    asked = tuple(
        Question(
            _text(record, turn, "query"), (_text(record, turn, "response"),), f"{record.digest} {number}"
        )
        for number, turn in enumerate(_listed(record, "dialog", "dialogTurns"))
    )
    return User(name, "meeting", notes, asked[:questions])


def _listed(record: JsonRecord, outer: str, inner: str) -> Sequence[Mapping[str, Any]]:
    whole = record.fields.get(outer)
    listed = whole.get(inner) if isinstance(whole, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise record.invalid(f"the field {outer!r} holds no list {inner!r} of objects")
    return listed


def _text(record: JsonRecord, fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise record.invalid(f"a field {name!r} is missing or no string")
    return value
