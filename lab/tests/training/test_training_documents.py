import random
import re
from dataclasses import replace
from string import Formatter

import pytest

from kvweave_lab.eval.tasks import TASKS, needles
from kvweave_lab.eval.world import TRAIN, split_of, variants
from training.documents import (
    SEPARATION,
    SHARES,
    Document,
    EasyWorld,
    TrainingHaystack,
    Writer,
    joined_words,
    training_haystack,
    training_words,
)
from training.phrases import CONTAINERS, further_phrases, relations
from training.shape import Shape
from training.wording import VARIED_SHARE, VariedWorld
from training.world import SIMILAR_ENDINGS, TrainingWorld


def count(text: str) -> int:
    return len(re.findall(r"\d|[^\W\d]{1,5}|[^\w\s]", text))


PLAIN = Shape(context=0, questions=0, chunks=(6, 6), chunk_tokens=(48, 128), sparse=0.3)
VOCABULARY = ("Ġthe", "Ġlantern", "Ġwh", "Ġa", "ĠThe", "oe", "kin", "b", "1", "lantern", "ing,")


def documents(seed: int, of: int, chunks: int, **given) -> list[Document]:
    writer = Writer(random.Random(seed), count, VOCABULARY)
    return [writer.document(chunks, replace(PLAIN, **given)) for _ in range(of)]


def test_every_task_has_a_share():
    assert set(SHARES) == set(TASKS)


def test_equal_generators_write_equal_documents():
    assert documents(1, 5, chunks=6) == documents(1, 5, chunks=6) != documents(2, 5, chunks=6)


@pytest.mark.parametrize("chunks", [1, 2, 5, 16])
@pytest.mark.parametrize("sizes", [(32, 64), (48, 128)])
def test_a_document_has_its_chunks_within_their_size(chunks, sizes):
    for document in documents(chunks, 8, chunks=chunks, chunk_tokens=sizes):
        assert len(document.chunks) == chunks
        assert all(0 < count(chunk) <= sizes[1] for chunk in document.chunks)


def test_a_passage_is_consecutive_and_within_its_tokens():
    sentences = [f"Number {number} of them." for number in range(10)]
    haystack = TrainingHaystack([" ".join(sentences)])
    for seed in range(20):
        passage = haystack.passage(random.Random(seed), 17, lambda text: len(text.split()))
        at = sentences.index(passage[0])
        assert passage == [sentences[(at + offset) % 10] for offset in range(4)]
    assert haystack.passage(random.Random(0), 2, lambda text: len(text.split())) == []


def test_a_haystack_sentence_sometimes_separates_sentences_at_a_cut(monkeypatch):
    monkeypatch.setattr("training.documents.SHARES", dict.fromkeys(SHARES, 0.0) | {"coref": 1.0})
    natural = {sentence for text in training_haystack().sentences() for sentence in text}
    separated = []
    for document in documents(6, 100, chunks=5, chunk_tokens=(100, 128)):
        pairs = zip(document.facts[::2], document.facts[1::2], strict=True)
        text = "|".join(chunk.strip() for chunk in document.chunks)
        for first, then in pairs:
            between = text[text.index(first) + len(first) : text.index(then)]
            if between != " ":  # not inside a chunk
                assert between == "|" or between.strip("| ") in natural
                separated.append(between != "|")
    assert len(separated) > 200
    assert SEPARATION - 0.1 < sum(separated) / len(separated) < SEPARATION + 0.1


def test_facts_and_answers_occur_in_the_document():
    count_of_questions = 0
    for document in documents(3, 30, chunks=8, easy=0.3):
        text = " ".join(document.chunks)
        for fact in document.facts:
            assert any(fact in chunk for chunk in document.chunks)
        for question in document.questions:
            assert question.answers
            assert all(
                re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", text) for answer in question.answers
            )
            assert all(answer in question.reply for answer in question.answers)
            count_of_questions += 1
    assert count_of_questions > 200


def test_all_tasks_occur_and_sparse_documents_have_fewer_questions():
    dense = documents(4, 80, chunks=10, sparse=0.0)
    assert {question.task for document in dense for question in document.questions} >= set(TASKS)
    sparse = documents(4, 40, chunks=10, sparse=1.0)
    assert 3 * sum(len(d.questions) for d in sparse) < sum(len(d.questions) for d in dense)


def test_names_of_an_easy_world_are_mostly_words():
    words = training_words()
    names = [EasyWorld(random.Random(seed), words).person() for seed in range(100)]
    assert 50 < sum(name.islower() for name in names) < 100


def test_training_words_are_words_of_the_training_text():
    text = " ".join(training_haystack().texts)
    assert all(re.search(rf"\b{word}\b", text) for word in training_words()[::50])


class TestVariedWorld:
    def sentences(self, garbled: float) -> list[str]:
        world = VariedWorld(random.Random(0), training_words(), training_words(), garbled)
        return [world.phrase(needles.STATED) for _ in range(600)]

    def test_uses_mostly_further_sentences(self):
        own = set(needles.STATED[TRAIN])
        share = sum(text not in own for text in self.sentences(0.0)) / 600
        assert VARIED_SHARE - 0.08 < share < VARIED_SHARE + 0.08

    def test_resolves_all_choices(self):
        assert not any(sign in text for text in self.sentences(0.0) for sign in "[]|")

    def test_garbled_sentences_keep_the_placeholders_and_the_mark(self):
        known = set(variants(*further_phrases(needles.STATED))) | set(needles.STATED[TRAIN])
        sentences = self.sentences(1.0)
        assert sum(text in known for text in sentences) < 200
        for text in sentences:
            assert {name for _, name, _, _ in Formatter().parse(text) if name} == {"a", "k", "v"}
            assert text[-1] in ".?!"


def test_varied_documents_have_further_kinds_of_facts():
    facts = " ".join(fact for document in documents(4, 60, chunks=6, varied=1.0) for fact in document.facts)
    roles = {relation.role for relation in relations()[3:]}
    asked = {
        question.text
        for document in documents(4, 60, chunks=6, varied=1.0)
        for question in document.questions
    }
    assert sum(any(re.search(rf"\b{role}\b", text) for text in asked) for role in roles) > 5
    assert any(re.search(rf"\b{place} [A-Z]", facts, re.IGNORECASE) for place in CONTAINERS[6:])


def test_values_may_be_composed_of_tokens():
    words = joined_words(VOCABULARY)
    assert all(re.fullmatch("(the|lantern|wh)(oe|kin|b|lantern){1,2}", word) for word in words)
    assert 20 < len(words) < 3 * (4 + 4 * 4)
    assert {split_of(word) for word in words} == {TRAIN}

    def joined(share: float) -> float:
        answers = [
            answer
            for document in documents(5, 40, chunks=6, joined=share)
            for question in document.questions
            if question.task in ("coref", "order")
            for answer in question.answers
        ]
        assert len(answers) > 50
        return sum(answer in words for answer in answers) / len(answers)

    assert joined(0.0) == 0.0
    assert 0.3 < joined(1.0) < 0.8


def test_similar_names_share_their_endings():
    for seed in range(20):
        world = TrainingWorld(random.Random(seed), ())
        usual = {world.person() for _ in range(40)}
        world.use_similar_names()
        names, towns = {world.person() for _ in range(40)}, {world.town() for _ in range(12)}
        assert len({*usual, *names, *towns}) == 92
        for alike in (names, towns):
            assert min(len({name[-size:] for name in alike}) for size in (2, 3, 4)) <= SIMILAR_ENDINGS
            assert len({name[:3] for name in alike}) > 8
