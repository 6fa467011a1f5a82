"""What strategies with an index read, and what they estimate, against plain attention."""

import pytest
import torch

from kvweave.decode.offloaded_cache import OffloadedCache, strategy_named
from kvweave.decode.strategy import token_budget
from kvweave.ops.partial_attention import PartialAttention
from support.synthetic import HEADS, geometry, settings

NAMES = ("oracle", "pqcache", "pqcache-fine", "quest", "clusterkv", "retroinfer", "outline-entries")
ENTRIES = 300


def retriever_of(name, keys, values, queries=None):
    with OffloadedCache(geometry(), settings(strategy=name)) as cache:
        made = strategy_named(name).retriever(0, cache.shared, cache.layers[0].hooks)
        made.fill(keys, values, queries)
        return made


def entries(count=ENTRIES, distinct=None):
    """Random keys and values (G, n, D); with `distinct`, so many pairs that repeat."""
    width = geometry().head_width
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, distinct or count, width)
    if distinct:
        own = torch.arange(count) % distinct
        keys, values = 4 * keys[:, own], values[:, own]
    return keys, values


def attended(made, keys, values, limit):
    """Return the output, plain attention's, and how many entries were read of each head."""
    query = torch.randn(1, 2 * HEADS, 1, keys.shape[2], generator=torch.Generator().manual_seed(1))
    first = torch.randn(2, HEADS, 4, keys.shape[2], generator=torch.Generator().manual_seed(2))
    own, plain = (PartialAttention(query, HEADS, scaling=0.3) for _ in range(2))
    for each in (own, plain):
        each.add(*first)
    read = made.attend(own, limit)
    plain.add(keys, values)
    return own.result(), plain.result(), read / HEADS


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_entries_attention_is_exact(name):
    keys, values = entries()
    got, expected, read = attended(retriever_of(name, keys, values), keys, values, ENTRIES + 50)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert read == ENTRIES


@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_read_than_allowed_and_later_entries_are_found(name):
    keys, values = entries()
    made = retriever_of(name, keys[:, :-20], values[:, :-20])
    budget = token_budget(settings(), ENTRIES)
    for at in range(ENTRIES - 20, ENTRIES):
        made.add(keys[:, at : at + 1], values[:, at : at + 1], budget)
    assert attended(made, keys, values, 40)[2] == 40
    got, expected, _ = attended(made, keys, values, ENTRIES)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["retroinfer", "outline-entries"])
def test_estimates_are_exact_where_the_entries_of_a_cluster_are_alike(name):
    keys, values = entries(distinct=4)
    got, expected, read = attended(retriever_of(name, keys, values, keys), keys, values, 10)
    assert read == 10
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["pqcache", "clusterkv", "quest", "oracle"])
def test_without_estimates_what_is_not_read_does_not_count(name):
    keys, values = entries(distinct=4)
    got, expected, _ = attended(retriever_of(name, keys, values), keys, values, 10)
    assert (got - expected).norm() > 0.05 * expected.norm()


def test_codes_of_their_own_rank_as_the_keys_do():
    """With fewer entries than codes every key is coded exactly."""
    keys, values = entries(count=200)
    by_codes = attended(retriever_of("pqcache-fine", keys, values), keys, values, 30)[0]
    by_keys = attended(retriever_of("oracle", keys, values), keys, values, 30)[0]
    torch.testing.assert_close(by_codes, by_keys, atol=1e-5, rtol=1e-5)


def test_an_outline_comes_closer_than_the_best_entries_alone():
    keys, values = entries()
    errors = {}
    for name in ("outline-entries", "oracle"):
        got, expected, _ = attended(retriever_of(name, keys, values), keys, values, 60)
        errors[name] = float((got - expected).norm())
    assert errors["outline-entries"] < 0.8 * errors["oracle"]
