"""What counts as an answer's facts, and how many of them a context bears out."""

import pytest

from kvweave_lab.eval.faithfulness import ContainedFacts, facts

CHUNKS = ("Brenek has the access code 4417.", "A lantern stands in box 9f1c-22ab.")


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        ("lantern, Kettle", ("lantern", "kettle")),
        ("Brenek 4417, Toulia 9023", ("brenek", "4417", "toulia", "9023")),
        ("The access code of Brenek is 4417.", ("brenek", "4417")),
        ("it is in the drawer", ("it", "is", "in", "the", "drawer")),
        ("9f1c-22ab; 3.5", ("9f1c-22ab", "3.5")),
        ("lantern, lantern", ("lantern",)),
        (" .", ()),
    ],
)
def test_facts_are_the_values_an_answer_states(answer, stated):
    assert facts(answer) == stated


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("4417", 1.0),
        ("441", 0.0),  # part of a value is another value
        ("Lantern, kettle", 0.5),
        ("9f1c-22ab, 9f1c-22ac, brenek, 4418", 0.5),
        ("The code of Brenek is 9023.", 0.5),
        ("", 0.0),
    ],
)
def test_share_of_facts_that_stand_in_the_context(answer, share):
    assert ContainedFacts().share(answer, CHUNKS) == share
