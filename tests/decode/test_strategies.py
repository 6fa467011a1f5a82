"""What all strategies guarantee; with a budget of 100 % they attend to all entries."""

from collections import Counter

import pytest
import torch
from synthetic import HEADS, Text, geometry, settings, stored, watched_attention

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.strategies import CLUSTERED, STRATEGIES
from kvweave.errors import InvalidRequest

LOSSLESS = sorted(set(STRATEGIES) - {"window"})

SMALL = 60_000  # bytes: enough for some of the clusters below, not for all


@pytest.mark.parametrize("strategy", LOSSLESS)
@pytest.mark.parametrize("begin", [0, 90])
def test_the_whole_budget_is_dense_attention(strategy, begin):
    with OffloadedCache(geometry(), settings(kv_budget=1.0, strategy=strategy)) as cache:
        text = Text(cache)
        if begin:
            text.begin(begin)
        for rows in [1, 7, 1, 12, *[1] * 70]:
            query, output = text.step(rows)
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", [*CLUSTERED, "entries"])
def test_a_memory_limit_changes_nothing(strategy):
    with OffloadedCache(
        geometry(2), settings(kv_budget=1.0, strategy=strategy, resident_bytes=SMALL)
    ) as cache:
        text = Text(cache, layers=2)
        text.begin(400)
        for _ in range(60):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
            assert cache.resident_bytes <= SMALL
        assert cache.counts.peak_resident_bytes <= SMALL
        assert cache.counts.pages_read > 0


@pytest.mark.parametrize("strategy", [*CLUSTERED, "window"])
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


@pytest.mark.parametrize("strategy", ["entries", "static", "local"])
def test_the_entries_with_the_largest_weights_are_attended_to(strategy):
    """The scan ranks every key, and so do clusters if all are candidates."""
    cache = OffloadedCache(
        geometry(), settings(kv_budget=40, strategy=strategy, clusters={"candidates": 1000.0})
    )
    text = Text(cache)
    text.begin(200)
    query, output = text.step()
    logits = (query[0].unflatten(0, (HEADS, -1))[:, :, 0] @ text.keys.transpose(1, 2)) * text.keys.shape[
        2
    ] ** -0.5
    between = slice(4, text.length - 8)  # after the sinks, before the window
    of_all = logits[:, :, between].softmax(-1) if strategy == "entries" else logits.softmax(-1)[:, :, between]
    best = of_all.sum(1).topk(40 - 4 - 8).indices + 4
    for head in range(HEADS):
        kept = [*range(4), *best[head].tolist(), *range(text.length - 8, text.length)]
        shares = logits[head][:, kept].softmax(-1)
        expected = shares @ text.values[head, kept]
        torch.testing.assert_close(
            output[0].unflatten(0, (HEADS, -1))[head, :, 0], expected, atol=1e-4, rtol=1e-4
        )
    cache.close()


def test_candidates_are_limited_to_what_memory_holds_at_once():
    """Otherwise evicted candidates would be read again; whole clusters are attended to instead."""
    outputs = []
    for candidates in (1.0, 1000.0):
        given = settings(
            kv_budget=60, resident_bytes=30_000, strategy="static", clusters={"candidates": candidates}
        )  # never split: splits depend on what memory holds
        with OffloadedCache(geometry(), given) as cache:
            text = Text(cache, marked=False)
            text.begin(600)
            outputs.append([text.step()[1] for _ in range(20)])
            assert cache.counts.peak_resident_bytes <= 30_000
    for whole, ranked in zip(*outputs, strict=True):
        torch.testing.assert_close(ranked, whole, atol=1e-5, rtol=1e-5)  # summed in another order


@pytest.mark.parametrize("strategy", CLUSTERED)
@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_rounded_entries_stay_close(strategy, storage):
    with OffloadedCache(geometry(), settings(kv_budget=1.0, strategy=strategy, storage=storage)) as cache:
        text = Text(cache, marked=False)
        text.begin(100)
        for _ in range(20):
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
    with pytest.raises(InvalidRequest, match=r"'quest'.*dynakv"):
        OffloadedCache(geometry(), settings(strategy="quest"))


def test_the_error_for_too_little_memory_names_the_missing_bytes():
    with pytest.raises(InvalidRequest, match=r"resident_bytes.*bytes more"):
        OffloadedCache(geometry(), settings(resident_bytes=4_000))
