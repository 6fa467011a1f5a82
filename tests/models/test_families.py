"""The families that the table names, each built tiny: what the table says of it is what happens."""

import warnings

import pytest

from kvweave.errors import UnsupportedModel
from kvweave.models.adapter import Adapter
from kvweave.models.families import REFUSALS
from kvweave.testing import REFUSED, tiny_model, tiny_tokenizer

NAMED = {kind: refusal for refusal in REFUSALS for kind in refusal.families.values()}
TINY = {kind: family for family, (kind, _, _) in REFUSED.items()}


def quiet_model(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some families warn about tiny configurations
        return tiny_model(family)


def test_every_refused_family_is_named_and_every_named_family_is_built():
    assert NAMED.keys() == TINY.keys()
    assert sum(len(refusal.families) for refusal in REFUSALS) == len(NAMED)  # none is named twice


@pytest.mark.parametrize("kind", NAMED)
def test_a_named_family_is_refused_in_one_line_that_names_the_mechanism(kind):
    with pytest.raises(UnsupportedModel) as refused:
        Adapter(quiet_model(TINY[kind]), tiny_tokenizer())
    assert NAMED[kind].mechanism in str(refused.value)
    assert "\n" not in str(refused.value)
