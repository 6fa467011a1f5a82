"""The sentences that training has beside the tasks' own."""

import random
from string import Formatter

import pytest

from kvweave_lab.eval.splits import TRAIN, chosen, variants
from kvweave_lab.eval.tasks import coref, twohop
from training import phrases
from training.phrases import lists, more, people, relations, towns


def names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("name", phrases._TOLD)
def test_a_further_sentence_has_the_placeholders_of_those_it_stands_beside(name):
    told = phrases._TOLD[name]
    wanted = names(told[TRAIN][0])
    assert len(more(told)) >= 20
    for text in variants(*more(told)):
        assert names(text) == wanted, text
        assert text[-1] in ".?!"


def test_no_list_says_anything_twice():
    for name, texts in lists().items():
        spoken = variants(*texts)
        assert len(set(spoken)) == len(spoken), name


def test_phrases_that_nothing_stands_beside_have_no_more():
    assert more({TRAIN: ("{k} is here.",)}) == ()


@pytest.mark.parametrize(("kinds", "own"), [(people, coref.GUEST), (towns, coref.TOWN)])
def test_kinds_of_reference_are_told_in_three_parts(kinds, own):
    first, *others = kinds()
    assert first is own
    assert len(others) >= 4
    for kind in others:
        assert all(names(text) == {"k"} for text in variants(*kind.named[TRAIN], *kind.asked[TRAIN]))
        for text in variants(*kind.referring[TRAIN]):
            assert {"v"} <= names(text) <= {"v", "s"}
            assert "the {v}" in text.lower()


def test_relations_are_those_of_the_task_and_others():
    assert relations()[: len(twohop.RELATIONS)] == twohop.RELATIONS
    roles = [relation.role for relation in relations()]
    assert len(set(roles)) == len(roles) > 20
    for relation in relations():
        for text in variants(*relation.phrases[TRAIN]):
            assert names(text) == {"p", "q"}, text
            assert "ROLE" not in text


def test_every_choice_can_be_made():
    rng = random.Random(0)
    made = {chosen(rng, "[a|b|] c [d|e].") for _ in range(200)}
    assert made == set(variants("[a|b|] c [d|e]."))
