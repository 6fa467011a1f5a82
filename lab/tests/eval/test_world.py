"""Text that a model was trained or a method tuned on never occurs in the test split."""

import random
import re
from itertools import combinations

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.world import (
    DEV,
    ENDINGS,
    HIDDEN,
    SPLITS,
    TEST,
    TOWNS,
    TRAIN,
    Haystack,
    Passages,
    World,
    nouns,
    split_of,
    starts,
    variants,
)
from lab_support.pools import all_phrases, normalised, pattern, placeholders
from training import phrases as training_phrases
from training.documents import (
    Document,
    Writer,
    joined_words,
    spliced_words,
    training_haystack,
    training_words,
)
from training.shape import Shape

OTHERS = (DEV, TEST, HIDDEN)
PHRASES = all_phrases()
VOCABULARY = [
    f"Ġ{noun[:cut]}" for split in SPLITS for noun in nouns(split) for cut in (2, 3, 4, len(noun))
] + [noun[cut:] for split in SPLITS for noun in nouns(split) for cut in (2, 3, 4)]
"""Tokens out of which every split's values could be put together."""


@pytest.fixture(scope="module")
def training() -> list[Document]:
    """Documents as training sees them: short and long, easy and hard, dense and sparse."""
    return _documents(easy=0.0) + _documents(easy=0.5)


@pytest.fixture(scope="module")
def otherwise() -> list[Document]:
    """Documents whose phrasing differs from the tasks', with similar names and values made of tokens."""
    return _documents(varied=1.0) + _documents(varied=0.5, alike=1.0, joined=1.0)


def _documents(**shares: float) -> list[Document]:
    writer = Writer(random.Random(5), lambda text: len(text) // 4, VOCABULARY)
    return [
        writer.document(chunks, Shape(0, 0, (chunks, chunks), (48, 128), sparse, **shares))
        for chunks in (2, 5, 12)
        for sparse in (0.0, 0.5)
        for _ in range(6)
    ]


@pytest.mark.parametrize(
    "draw",
    [World.person, World.town, World.thing, World.uuid, lambda world: world.number(4)],
    ids=["person", "town", "thing", "uuid", "number"],
)
def test_everything_a_world_draws_belongs_to_one_split(draw):
    drawn = {
        split: {
            draw(world)
            for seed in range(30)
            for world in [World(random.Random(seed), split)]
            for _ in range(20)
        }
        for split in SPLITS
    }
    for split, texts in drawn.items():
        assert len(texts) >= 30, split
        assert {split_of(text) for text in texts} == {split}
    for one, other in combinations(SPLITS, 2):
        assert not {text.lower() for text in drawn[one]} & {text.lower() for text in drawn[other]}


def test_a_world_draws_nothing_twice():
    world = World(random.Random(0), TEST)
    drawn = [
        draw() for _ in range(15) for draw in (world.person, world.town, world.thing, lambda: world.number(3))
    ]
    assert len(set(drawn)) == len(drawn)


def test_every_noun_is_in_exactly_one_split():
    listed = [noun for split in SPLITS for noun in nouns(split)]
    assert len(set(listed)) == len(listed) > 400
    assert all(len(nouns(split)) >= 40 for split in SPLITS)  # enough for any task's document


def test_the_phrases_of_every_task_are_found():
    modules = {name.partition(".")[0] for name in PHRASES}
    assert modules == {"needles", "chains", "word_counts", "coref", "order"}
    assert sum(name.startswith("coref.") for name in PHRASES) == 6  # those inside NamedTuples too


@pytest.mark.parametrize("name", PHRASES)
def test_phrases_have_all_splits_and_the_same_placeholders(name):
    phrases = PHRASES[name]
    assert set(phrases) == set(SPLITS)
    assert all(isinstance(sentences, tuple) and sentences for sentences in phrases.values())
    assert len({placeholders(text) for sentences in phrases.values() for text in sentences}) == 1


def test_no_other_sentence_of_training_is_in_another_split():
    further = {
        normalised(text) for texts in training_phrases.sentence_lists().values() for text in variants(*texts)
    }
    assert len(further) > 2000
    for phrases in PHRASES.values():
        for split in OTHERS:
            assert not further & {normalised(text) for text in phrases[split]}


def test_no_sentence_is_in_two_splits():
    spoken: dict[str, set[str]] = {}
    for phrases in PHRASES.values():
        for split, sentences in phrases.items():
            for text in sentences:
                spoken.setdefault(normalised(text), set()).add(split)
    assert {text: splits for text, splits in spoken.items() if len(splits) > 1} == {}


def test_haystacks_share_no_sentence():
    haystacks = {split: Haystack.of_split(split) for split in OTHERS} | {TRAIN: training_haystack()}
    spoken = {split: _sentences(haystack) for split, haystack in haystacks.items()}
    for split, sentences in spoken.items():
        assert len(sentences) > 300, split
    for one, other in combinations(SPLITS, 2):
        assert not spoken[one] & spoken[other], (one, other)


def test_training_words_are_no_noun_of_another_split():
    assert len(training_words()) > 1000
    for split in OTHERS:
        assert not set(training_words()) & set(nouns(split))


def test_words_put_together_of_tokens_are_the_train_splits():
    words = joined_words(tuple(VOCABULARY))
    assert len(words) > 1000
    assert {split_of(word) for word in words} == {TRAIN}
    assert not set(words) & {noun for split in OTHERS for noun in nouns(split)}


def test_a_name_of_another_split_is_no_word_that_training_uses_as_a_value():
    names = {start + ending for start in starts() for ending in (*ENDINGS, *TOWNS)}
    others = {name for name in names if split_of(name) != TRAIN}
    assert len(others) > 10_000
    assert not others & {*training_words(), *nouns(TRAIN), *joined_words(tuple(VOCABULARY))}
    # One was let through before anything looked: the rows that the shipped weights saw stay as they were.
    assert {name: split_of(name) for name in others & {*spliced_words()}} == {"liston": "dev"}


def test_training_documents_draw_values_from_their_own_split(training, otherwise):
    answers = {
        answer.lower()
        for document in training + otherwise
        for question in document.questions
        for answer in question.answers
    }
    assert len(answers) > 300
    for split in OTHERS:
        assert not answers & set(nouns(split))
    generated = {
        answer for answer in answers if not answer.isalpha()
    }  # numbers and UUIDs; words may be a text's
    assert {split_of(answer) for answer in generated} == {TRAIN}


def test_training_documents_use_phrases_of_their_split_only(training, otherwise):
    said, asked = _spoken(training)
    spoken = {split: _patterns(split) for split in SPLITS}
    for text in set.union(said, asked, *_spoken(otherwise)):
        for split in OTHERS:
            assert not any(form.fullmatch(text) for form in spoken[split]), (split, text)
    helpers = re.compile(r"Who is the \w+ of \w+\?|What is the treasure of \w+\?")  # of training alone
    for text in said | asked:
        assert helpers.fullmatch(text) or any(form.fullmatch(text) for form in spoken[TRAIN]), text


def test_training_documents_hold_no_haystack_of_another_split(training, otherwise):
    read = _sentences(Haystack([" ".join(document.chunks) for document in training + otherwise]))
    assert read & _sentences(training_haystack())
    for split in OTHERS:
        assert not read & _sentences(Haystack.of_split(split)), split


def _sentences(haystack: Haystack) -> set[str]:
    return {normalised(sentence) for document in haystack.sentences() for sentence in document}


def _spoken(documents: list[Document]) -> tuple[set[str], set[str]]:
    """Return the texts of documents, and the questions about them."""
    said = {fact for document in documents for fact in document.facts}
    return said, {question.text for document in documents for question in document.questions}


def _patterns(split: str) -> list[re.Pattern[str]]:
    return [pattern(text) for phrases in PHRASES.values() for text in phrases[split]]


def words(text: str) -> int:
    return len(text.split())


def test_sentences_are_cut_at_their_ends():
    haystack = Haystack(['He asked: "Why?" She shrugged! It cost 3.50 that day.\n\nThe end'])
    assert list(haystack.sentences()[0]) == [
        'He asked: "Why?"',
        "She shrugged!",
        "It cost 3.50 that day.",
        "The end",
    ]


def test_a_folder_gives_its_text_files_at_any_depth(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.md").write_text("First.")
    (tmp_path / "deep" / "c.txt").write_bytes(b"Third \xff.")
    (tmp_path / "picture.png").write_text("No text.")
    documents = [sentence for document in Haystack.of_folder(tmp_path).sentences() for sentence in document]
    assert documents == ["First.", "Second.", "Third \ufffd."]


def test_a_path_without_text_files_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="is not a folder; --haystack takes"):
        Haystack.of_folder(tmp_path / "missing")
    with pytest.raises(InvalidRequest, match="holds no text; name a folder"):
        Haystack.of_folder(tmp_path)


@pytest.mark.parametrize("split", ["train", "exam"])
def test_a_split_without_a_haystack_is_refused(split):
    with pytest.raises(
        InvalidRequest, match=rf"no haystack ships for the split '{split}'; choose dev, test or hidden"
    ):
        Haystack.of_split(split)


def test_sentences_with_a_word_of_the_document_are_left_out():
    haystack = Haystack(
        [
            "The Lantern was lit. It rained. A lantern's light. Lanterns glow. It rained.",
            "Room 44 17. 4417 men.",
        ]
    )
    assert haystack.without(["lantern", "4417"]) == ["It rained.", "Lanterns glow.", "Room 44 17."]
    assert haystack.without(["550e8400-e29b", "It"])[:2] == ["The Lantern was lit.", "A lantern's light."]
    assert len(haystack.without([])) == 6  # duplicates count once


class TestPassages:
    SENTENCES = tuple(f"Number {number} of them." for number in range(10))

    def passages(self, seed, sentences=SENTENCES):
        return Passages(random.Random(seed), sentences, words)

    @pytest.mark.parametrize("seed", range(20))
    def test_sentences_of_one_length_follow_each_other(self, seed):
        texts, tokens = self.passages(seed).draw(17)
        at = self.SENTENCES.index(texts[0])
        assert texts == [self.SENTENCES[(at + offset) % 10] for offset in range(4)]
        assert tokens == 16

    @pytest.mark.parametrize("seed", range(20))
    def test_after_one_that_does_not_fit_others_are_tried(self, seed):
        texts, tokens = self.passages(seed, ("One two three four.", "Five six seven.", "Eight.")).draw(5)
        assert tokens == 5 or texts == ["Five six seven.", "Eight."] or texts == ["Eight.", "Five six seven."]

    @pytest.mark.parametrize("seed", range(20))
    def test_nothing_comes_again_before_everything_has_come(self, seed):
        passages = self.passages(seed)
        drawn = [text for tokens in (9, 13, 8, 4, 4, 44) for text in passages.draw(tokens)[0]]
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(self.SENTENCES)

    def test_a_small_place_stays_empty_rather_than_have_something_again(self):
        passages = self.passages(0, ("One.", "Two three four five six.", "Seven eight nine ten eleven."))
        assert passages.draw(1) == (["One."], 1)
        assert passages.draw(1) == ([], 0)

    @pytest.mark.parametrize(
        ("sentences", "tokens"), [((), 9), (SENTENCES, 3), (SENTENCES, 0), (SENTENCES, -2)]
    )
    def test_where_nothing_fits_nothing_comes(self, sentences, tokens):
        assert self.passages(0, sentences).draw(tokens) == ([], 0)
