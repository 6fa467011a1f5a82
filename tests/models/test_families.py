"""The families that the tables name, each built tiny: what the tables say of it is what happens."""

import re

import pytest

from kvweave.errors import UnsupportedModel
from kvweave.models.adapter import Adapter
from kvweave.models.families import PREFIX_ONLY
from kvweave.models.families import REFUSED as UNUSABLE
from kvweave.models.snapshot_adapter import SnapshotAdapter, adapt
from kvweave.testing import tiny_tokenizer
from support.refused_models import REFUSED, refused_model


def reasons(table):
    return {kind: limitation.reason for limitation in table for kind in limitation.families.values()}


def test_the_tables_name_every_family_that_is_built_once():
    named = [kind for limitation in (*PREFIX_ONLY, *UNUSABLE) for kind in limitation.families.values()]
    assert sorted(named) == sorted(REFUSED)


@pytest.mark.parametrize("kind", reasons(PREFIX_ONLY))
def test_a_family_that_kv_cannot_be_placed_in_is_used_with_exact_prefixes(kind):
    with pytest.raises(UnsupportedModel) as refused:
        Adapter(refused_model(kind), tiny_tokenizer())
    assert reasons(PREFIX_ONLY)[kind] in str(refused.value)
    assert "\n" not in str(refused.value)
    adapter = adapt(refused_model(kind), tiny_tokenizer(), kind)
    assert isinstance(adapter, SnapshotAdapter)
    assert reasons(PREFIX_ONLY)[kind] in adapter.reason


@pytest.mark.parametrize("kind", reasons(UNUSABLE))
def test_a_family_whose_state_cannot_be_stored_is_refused_in_one_line_with_the_reason(kind):
    with pytest.raises(UnsupportedModel) as refused:
        adapt(refused_model(kind), tiny_tokenizer(), kind)
    assert reasons(UNUSABLE)[kind] in str(refused.value)
    assert re.search(REFUSED[kind][1], str(refused.value))  # why KV cannot be placed in it either
    assert "\n" not in str(refused.value)
