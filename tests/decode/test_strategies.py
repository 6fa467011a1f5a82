"""What all strategies guarantee, the lab's too; with a budget of 100 % they attend to all entries."""

from collections import Counter

import pytest
import torch

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import InvalidRequest
from support.synthetic import (
    CLUSTERED,
    HEADS,
    LOSSLESS,
    RETRIEVING,
    Text,
    geometry,
    settings,
    stored,
    watched_attention,
)

EVERYTHING = 9_999  # entries, more than a text here has: clusters are chosen all the same
SMALL = 60_000  # bytes: enough for some of the clusters below, not for all


@pytest.mark.parametrize("strategy", LOSSLESS)
@pytest.mark.parametrize("begin", [0, 90])
@pytest.mark.parametrize("budget", [1.0, EVERYTHING])
def test_the_whole_budget_is_dense_attention(strategy, begin, budget):
    with OffloadedCache(geometry(), settings(kv_budget=budget, strategy=strategy)) as cache:
        text = Text(cache)
        if begin:
            text.begin(begin)
        for rows in [1, 7, 1, 12, *[1] * 70]:
            query, output = text.step(rows)
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", RETRIEVING)
@pytest.mark.parametrize("budget", [1.0, EVERYTHING])
def test_a_memory_limit_changes_nothing(strategy, budget):
    limited = settings(kv_budget=budget, strategy=strategy, resident_bytes=SMALL)
    with OffloadedCache(geometry(2), limited) as cache:
        text = Text(cache, layers=2)
        text.begin(400)
        for _ in range(60):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
            assert cache.resident_bytes <= SMALL
        assert cache.counts.peak_resident_bytes <= SMALL
        assert cache.counts.pages_read > 0


@pytest.mark.parametrize("strategy", CLUSTERED)
@pytest.mark.parametrize("budget", [0.2, 40])
def test_a_step_attends_to_no_more_than_the_budget(strategy, budget, monkeypatch):
    with OffloadedCache(geometry(), settings(kv_budget=budget, strategy=strategy)) as cache:
        text = Text(cache)
        text.begin(200)
        for _ in range(80):
            with watched_attention(monkeypatch) as seen:
                text.step()
            allowed = budget if budget > 1 else -(-budget * text.length // 1)
            for head in range(HEADS):
                assert max(seen[head].values()) == 1  # nothing twice
                assert sum(seen[head].values()) <= allowed
                assert {0, 1, 2, 3, text.length - 1} <= set(seen[head])  # sinks and the row itself


@pytest.mark.parametrize("strategy", CLUSTERED)
@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("bias", [0.0, 300.0])
@pytest.mark.parametrize("budget", [1.0, 100])
def test_rounded_entries_stay_close(strategy, storage, bias, budget):
    """Also where one channel is large in every key, as the bias of a key projection makes it."""
    with OffloadedCache(geometry(), settings(kv_budget=budget, strategy=strategy, storage=storage)) as cache:
        text = Text(cache, marked=False, bias=bias)
        text.begin(60)
        for _ in range(30):
            query, output = text.step()
            assert (output - text.dense(query)).abs().mean() < {"int8": 0.05, "int4": 0.5}[storage]


@pytest.mark.parametrize("strategy", CLUSTERED)
def test_no_entry_is_lost_or_duplicated(strategy):
    with OffloadedCache(geometry(), settings(kv_budget=0.3, strategy=strategy)) as cache:
        text = Text(cache)
        text.begin(150)
        for _ in range(120):
            text.step()
        assert stored(cache) == [Counter(range(text.length))] * HEADS


def test_a_batch_is_rejected():
    with OffloadedCache(geometry(), settings()) as cache:
        rows = torch.zeros(2, HEADS, 1, 8)
        with pytest.raises(InvalidRequest, match="batch of 2"):
            cache.layers[0].update(rows, rows)


def test_the_error_for_an_unknown_strategy_names_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"'nearest'.*dynakv"):
        OffloadedCache(geometry(), settings(strategy="nearest"))


def test_the_error_for_too_little_memory_names_the_missing_bytes():
    with pytest.raises(InvalidRequest, match=r"resident_bytes.*bytes more"):
        OffloadedCache(geometry(), settings(resident_bytes=4_000))
