"""The further sentences of training."""

import random
from string import Formatter

import pytest

from kvweave_lab.eval.tasks import chains, coref
from kvweave_lab.eval.world import TRAIN, chosen, variants
from training import phrases
from training.phrases import further_phrases, people, relations, sentence_lists, towns


def names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("name", phrases.LISTED_PHRASES)
def test_further_sentences_have_the_placeholders_of_the_tasks_own(name):
    own = phrases.LISTED_PHRASES[name]
    wanted = names(own[TRAIN][0])
    assert len(further_phrases(own)) >= 20
    for text in variants(*further_phrases(own)):
        assert names(text) == wanted, text
        assert text[-1] in ".?!"


def test_no_list_has_duplicates():
    for name, texts in sentence_lists().items():
        sentences = variants(*texts)
        assert len(set(sentences)) == len(sentences), name


def test_other_phrases_have_no_further_sentences():
    assert further_phrases({TRAIN: ("{k} is here.",)}) == ()


@pytest.mark.parametrize(("kinds", "own"), [(people, coref.GUEST), (towns, coref.TOWN)])
def test_kinds_of_references_have_three_parts(kinds, own):
    first, *others = kinds()
    assert first is own
    assert len(others) >= 4
    for kind in others:
        assert all(names(text) == {"k"} for text in variants(*kind.named[TRAIN], *kind.asked[TRAIN]))
        for text in variants(*kind.referring[TRAIN]):
            assert {"v"} <= names(text) <= {"v", "s"}
            assert "the {v}" in text.lower()


def test_relations_are_the_tasks_and_further_ones():
    assert relations()[: len(chains.RELATIONS)] == chains.RELATIONS
    roles = [relation.role for relation in relations()]
    assert len(set(roles)) == len(roles) > 20
    for relation in relations():
        for text in variants(*relation.phrases[TRAIN]):
            assert names(text) == {"p", "q"}, text
            assert "ROLE" not in text


def test_every_choice_occurs():
    rng = random.Random(0)
    made = {chosen(rng, "[a|b|] c [d|e].") for _ in range(200)}
    assert made == set(variants("[a|b|] c [d|e]."))
