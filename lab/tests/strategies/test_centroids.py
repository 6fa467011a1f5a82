"""Centroids are read from disk as they were written, or not at all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.page_file import PageFile
from kvweave.errors import InvalidRequest, StoreError
from kvweave_lab.strategies.centroid import CentroidSettings
from kvweave_lab.strategies.centroids import Centroids

LAYERS, HEADS, WIDTH, PAGE_BYTES = (
    2,
    3,
    8,
    64,
)  # two rows per page: pages and columns end at different places


def opened(path) -> Centroids:
    file = PageFile(path, PAGE_BYTES, DecodeCounts(), direct=False)
    return Centroids(LAYERS, HEADS, WIDTH, file)


@how(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1), st.integers(0, HEADS - 1), st.booleans(), st.integers(0, 2**20)
        ),
        min_size=1,
        max_size=150,
    )
)
def test_centroids_survive_releases(tmp_path_factory, puts):
    """Heads have different numbers of clusters, and the file had other content before."""
    path = tmp_path_factory.mktemp("centroids") / "centroids.pages"
    path.write_bytes(b"\xff" * 200_000)
    rows: dict[tuple[int, int, int], torch.Tensor] = {}
    counts = [[0] * HEADS for _ in range(LAYERS)]
    first = opened(path)
    for layer, head, released, number in puts:
        if number % 3 or not counts[layer][head]:
            cluster, counts[layer][head] = counts[layer][head], counts[layer][head] + 1
        else:
            cluster = number % counts[layer][head]
        rows[layer, head, cluster] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
        first.put(layer, head, cluster, rows[layer, head, cluster])
        if released:
            first.release(layer, write=number % 2 == 0)
    for layer in range(LAYERS):
        first.release(layer, write=True)
    for layer in range(LAYERS):
        found = first.get(layer)
        assert found.shape[1] == max(counts[layer])
        for head in range(HEADS):
            for cluster in range(found.shape[1]):
                expected = rows.get((layer, head, cluster), torch.zeros(WIDTH))
                assert torch.equal(found[head, cluster], expected)
    first.close()


@pytest.mark.parametrize("at", [0, PAGE_BYTES * 6 - 1])
def test_a_flipped_bit_on_disk_is_detected(tmp_path, at):
    path = tmp_path / "centroids.pages"
    first = opened(path)
    for cluster in range(4):
        for head in range(HEADS):
            first.put(0, head, cluster, torch.full((WIDTH,), float(cluster)))
    first.release(0, write=True)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="centroids of layer 0 were read and are not what was written"):
        first.get(0)
    first.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer_entries": -1}, r"buffer_entries is -1"),
        ({"spread": 0}, r"spread is 0"),
        ({"spread": math.nan}, r"spread is nan"),
        ({"candidates": 0.5}, r"candidates is 0\.5"),
        ({"mean_entries": 200}, r"clusters of 200 entries on average and 128"),
    ],
)
def test_invalid_settings_are_explained(changes, message):
    with pytest.raises(InvalidRequest, match=message):
        CentroidSettings(**changes)
