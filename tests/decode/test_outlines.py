"""Outlines stand for entries that are not read: close to them, within the memory that was asked for, and the same after a restart."""

from collections import Counter

import pytest
import torch

from kvweave.decode.clusters.outlines import Outlines
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.decode.strategy import token_budget
from kvweave.models.support import Geometry
from kvweave.ops.partial_attention import PartialAttention
from support.synthetic import GROUP, HEADS, WIDTH, Text, geometry, settings, stored

N, MEAN = 600, 8


def outlined(count: int = N, bias: float = 0.0) -> tuple[Outlines, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outlines of the keys and values (G, n, D) of a text, these, and each entry's cluster (G, n)."""
    text = Text(None, marked=False, bias=bias)
    keys, values = text.entries(count)
    outlines = Outlines(HEADS, WIDTH)
    outlines.learn_space(keys, values, None)
    groups = outlines.groups(keys, values, MEAN, 2 * MEAN)
    outlines.make_room(max(map(len, groups)), count)
    own = torch.zeros(HEADS, count, dtype=torch.long)
    for head, each in enumerate(groups):
        for cluster, mine in enumerate(each):
            outlines.put_cluster(head, cluster, keys[head, mine].mean(0), values[head, mine].mean(0))
            own[head, mine] = cluster
    outlines.learn_codes(keys, own)
    outlines.add_entries(keys, own.int())
    return outlines, keys, values, own


def sizes_of(outlines: Outlines, own: torch.Tensor) -> torch.Tensor:
    sizes = torch.zeros(HEADS, outlines.clusters)
    return sizes.scatter_add_(1, own, torch.ones(own.shape))


@pytest.mark.parametrize("bias", [0.0, 300.0])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_mass_of_a_cluster_is_nearly_that_of_its_entries(bias, rows):
    """Also where one channel is large in every key; with many rows by the mean key alone, which is coarser."""
    outlines, keys, _, own = outlined(bias=bias)
    query = torch.randn(HEADS, rows, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.3
    logits = query @ keys.transpose(1, 2)
    exact = torch.zeros(HEADS, rows, outlines.clusters)
    exact.scatter_add_(2, own[:, None].expand_as(logits), (logits - logits.amax(-1, keepdim=True)).exp())
    found = outlines.log_masses(query, sizes_of(outlines, own), None)
    shares = found.softmax(-1), exact / exact.sum(-1, keepdim=True)
    assert (shares[0] - shares[1]).abs().sum(-1).mean() < (0.2 if rows == 1 else 0.3)


def test_a_cluster_of_one_is_exact_but_for_rounding():
    outlines, keys, values, _ = outlined(MEAN)
    outlines.make_room(1, 0)
    outlines.put_cluster(0, outlines.clusters, keys[0, 3], values[0, 3])
    (found,) = outlines.mean_values()[:1, -1]
    torch.testing.assert_close(found.float(), values[0, 3], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("clusters", [1, 30, 400])
@pytest.mark.parametrize("entries", [1, 50, 900])
def test_growth_takes_no_more_than_was_said(clusters, entries):
    outlines, *_ = outlined()
    said, before = outlines.growth_bytes(clusters, entries), outlines.resident_bytes
    outlines.make_room(clusters, entries)
    first = outlines.clusters
    for number in range(first, first + clusters):
        for head in range(HEADS):
            outlines.put_cluster(head, number, *torch.zeros(2, WIDTH))
    outlines.add_entries(torch.zeros(HEADS, entries, WIDTH), torch.zeros(HEADS, entries, dtype=torch.int32))
    assert outlines.resident_bytes - before <= said


def test_a_restored_state_answers_alike():
    outlines, _, _, own = outlined()
    again = Outlines(HEADS, WIDTH)
    again.restore(outlines.state())
    query, sizes = torch.randn(HEADS, 2, WIDTH), sizes_of(outlines, own)
    assert torch.equal(again.log_masses(query, sizes, None), outlines.log_masses(query, sizes, None))
    assert torch.equal(again.mean_values(), outlines.mean_values())
    keys, values = torch.randn(2, HEADS, 3, WIDTH)
    assert torch.equal(again.nearest(keys, values, sizes > 0), outlines.nearest(keys, values, sizes > 0))
    assert again.growth_bytes(3, 3) == outlines.growth_bytes(3, 3)


def test_what_is_not_read_counts(monkeypatch):
    """The output is closer to dense attention than without estimates, and than DynaKV's at the same budget."""

    def error(strategy: str) -> float:
        errors = []
        with OffloadedCache(geometry(), settings(kv_budget=0.2, strategy=strategy)) as cache:
            text = Text(cache, marked=False)
            text.begin(N)
            for _ in range(20):
                query, output = text.step()
                dense = text.dense(query)
                errors.append(float((output - dense).norm() / dense.norm()))
        return sum(errors) / len(errors)

    ours = error("outline")
    assert ours < 0.8 * error("dynakv")
    monkeypatch.setattr(PartialAttention, "add_estimate", lambda *_: None)
    assert ours < 0.5 * error("outline")


def test_new_entries_begin_a_cluster_where_the_nearest_is_full():
    chosen = settings(kv_budget=1_000, clusters={"mean_entries": 4, "max_entries": 4})
    with OffloadedCache(geometry(), chosen) as cache:
        text = Text(cache)
        text.begin(60)
        table = cache.layers[0].retriever.table
        before = table.count.copy()
        for rows in [*[1] * 30, 40]:
            query, output = text.step(rows)
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
        assert (table.count > before).all()
        assert (
            table.count - before
        ).max() < 70 / 2  # of 70 entries: a successor is filled before another is begun
        assert table.sizes.max() <= 4
        assert stored(cache) == [Counter(range(text.length))] * HEADS


def test_wide_heads_fill_a_cluster_before_they_begin_another():
    """In wide heads the mean of a full cluster is nearer to a new entry than any entry is."""
    wide, generator = Geometry(1, HEADS, 64, 4096, torch.float32, torch.device("cpu")), torch.Generator()
    first, later = (torch.randn(2, HEADS, n, 64, generator=generator.manual_seed(n)) for n in (200, 600))
    chosen = OffloadSettings(0.2)
    with OffloadedCache(wide, chosen) as cache:
        retriever = cache.layers[0].retriever
        retriever.fill(*first, None)
        before = retriever.table.count.copy()
        retriever.add(*later, token_budget(chosen, 800))
        assert (retriever.table.count - before).max() <= 600 / 16
        assert (retriever.table.sizes.sum(1) == 800).all()


def test_many_rows_share_what_is_read(monkeypatch):
    def error() -> float:
        with OffloadedCache(geometry(), settings(kv_budget=0.3)) as cache:
            text = Text(cache, marked=False)
            text.begin(300)
            query, output = text.step(rows=40 // GROUP)
            dense = text.dense(query)
            return float((output - dense).norm() / dense.norm())

    ours = error()
    monkeypatch.setattr(PartialAttention, "add_estimate", lambda *_: None)
    assert ours < 0.7 * error()
