"""Generated users: seeded, varied, and in phrasings that the reference model was not trained on."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.personas.users import KINDS, NOTES, POOLS, load_pool, make_users
from kvweave_lab.eval.tasks import needles as attributes
from kvweave_lab.eval.world import DEV, HIDDEN, SPLITS, TEST, TRAIN, Haystack, split_of
from lab_support.pools import all_phrases, normalised, pattern
from training.documents import training_haystack
from training.wording import reword

_SENTENCE = re.compile(r"(?<=[.?!])\s+")


def phrasings(split):
    """Return every sentence of a pool, placeholders unfilled."""
    pool = load_pool(split)
    whole = [text for frame in pool.frames.values() for text in frame.phrasings]
    whole += [text for family in pool.families for text in family.phrasings]
    return {sentence for text in whole for sentence in _SENTENCE.split(text)}


def test_the_pools_share_no_phrasing():
    pools = {split: {normalised(text) for text in phrasings(split)} for split in POOLS}
    assert all(len(sentences) > 60 for sentences in pools.values())
    assert not pools[DEV] & pools[TEST]


def test_no_test_question_occurs_where_the_answer_cache_is_developed():
    root = Path(__file__).parents[3]
    places = [
        *(root / "src" / "kvweave" / "answer_cache").rglob("*.*"),
        *(root / "tests" / "answer_cache").glob("*.py"),
    ]
    texts = [
        path.read_text("utf-8") for path in places if path.is_file() and path.suffix not in (".pyc", ".xz")
    ]
    strings = [normalised(sentence) for text in texts for sentence in re.findall(r'"([^"\n]+)"', text)]
    assert normalised("Who blackmails the vicar?") in strings
    for text in (text for family in load_pool(TEST).families for text in family.asked):
        form = re.escape(normalised(text)).replace(r"\{\}", r"[\w ]+")
        assert [sentence for sentence in strings if re.fullmatch(form, sentence)] == [], text


@pytest.mark.parametrize("split", POOLS)
def test_no_phrasing_is_one_that_the_reference_model_was_trained_on(split):
    known = {
        normalised(text) for phrases in all_phrases().values() for other in SPLITS for text in phrases[other]
    }
    assert len(known) > 500
    assert {text for text in phrasings(split) if normalised(text) in known} == set()


@pytest.mark.parametrize("split", POOLS)
def test_no_sentence_of_a_user_could_occur_in_training(split):
    trained = [pattern(text) for phrases in all_phrases().values() for text in phrases[TRAIN]]
    natural = {normalised(text) for document in training_haystack().sentences() for text in document}
    for user in make_users(split, 6, 8, seed=1):
        sentences = [
            line for note in user.notes for text in note.text.splitlines() for line in _SENTENCE.split(text)
        ]
        for sentence in [*sentences, *(asked.text for asked in user.questions)]:
            assert not any(form.fullmatch(sentence) for form in trained), sentence
            assert not sentence or normalised(sentence) not in natural, sentence


def test_training_rewords_no_sentence_into_a_phrasing_of_a_pool():
    """Rewording adds or replaces words. None of these words occurs in the phrasings."""
    rng = random.Random(0)
    taken = {normalised(text) for split in POOLS for text in phrasings(split)}
    trained = [text for phrases in all_phrases().values() for text in phrases[TRAIN]]
    made = {normalised(reword(rng, text, ["lantern"])) for text in trained for _ in range(20)}
    assert len(made) > 5000
    assert not made & taken


def test_users_are_seeded_and_a_smaller_count_gives_the_first_of_them():
    users = make_users(TEST, 6, 9, seed=3)
    assert users == make_users(TEST, 6, 9, seed=3)
    assert users[:2] == make_users(TEST, 2, 9, seed=3)
    assert users != make_users(TEST, 6, 9, seed=4)
    assert [user.kind for user in users] == [*KINDS, *KINDS]
    assert len({user.name for user in users}) == len(users)
    assert all(len(user.notes) == NOTES and len(user.questions) == 9 for user in users)


def test_the_defaults_give_as_many_users_and_questions_as_the_paper():
    users = [user for seed in range(5) for user in make_users(TEST, 20, 14, seed)]
    assert len({user.name for user in users}) == 100
    for seed in range(5):
        assert sum(len(user.questions) for user in users if f"-{seed}-" in user.name) >= 275


@pytest.mark.parametrize("split", POOLS)
def test_every_answer_occurs_exactly_once_in_the_notes(split):
    for user in make_users(split, 6, 14, seed=2):
        text = " ".join(note.text for note in user.notes).lower()
        for attribute in (*attributes.NUMBERS, *attributes.WORDS):
            text = text.replace(f" {attribute} ", " ")  # the attribute "badge" is not the answer "badge"
        words = Counter(re.findall(r"\w+", text))
        for asked in user.questions:
            (answer,) = asked.answers
            value = answer.split(", ")[-1]
            assert words[value] == 1, (user.name, asked)
            assert split_of(value) == split


def test_questions_are_varied_and_some_repeat():
    users = make_users(TEST, 20, 14, seed=0)
    facts = [Counter(asked.fact for asked in user.questions) for user in users]
    again = sum(sum(counts.values()) - len(counts) for counts in facts) / (20 * 14)
    assert 0.1 < again < 0.4
    words = [Counter(asked.text for asked in user.questions) for user in users]
    same_words = sum(sum(counts.values()) - len(counts) for counts in words) / (20 * 14)
    assert 0.02 < same_words < again
    assert all(len({asked.fact.split()[0] for asked in user.questions}) >= 3 for user in users)


def test_questions_with_one_fact_have_one_answer():
    for user in make_users(TEST, 6, 30, seed=5):
        answers = {}
        for asked in user.questions:
            assert answers.setdefault(asked.fact, asked.answers) == asked.answers


def test_a_split_without_a_pool_is_refused():
    with pytest.raises(InvalidRequest, match="dev, test"):
        make_users(HIDDEN, 1, 2, 0)


def test_natural_sentences_are_those_of_the_split():
    own = {sentence for document in Haystack.of_split(TEST).sentences() for sentence in document}
    (user,) = make_users(TEST, 1, 4, seed=0)
    text = " ".join(note.text for note in user.notes)
    assert sum(sentence in text for sentence in own) >= NOTES
