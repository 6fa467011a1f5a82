"""k-means on points with known groups, and splits that must always succeed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops.kmeans import k_means, nearest, split_in_two


def groups(heads: int, of: int, each: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points (G, of · each, 3) around distant centres, group by group, and the group of each."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(heads, of, 3, generator=random) * 50
    which = torch.arange(of).repeat_interleave(each)
    return centres[:, which] + torch.randn(heads, of * each, 3, generator=random), which


def test_distant_groups_are_found():
    points, which = groups(3, 4, 20)
    assigned = k_means(points, 4)
    for head in assigned:
        assert len({(int(a), int(b)) for a, b in zip(head, which, strict=True)}) == 4


def test_nearest_is_by_distance_and_ignores_masked_centres():
    points, centres = torch.tensor([[[0.0], [10.0]]]), torch.tensor([[[1.0], [4.0], [11.0]]])
    assert nearest(points, centres).tolist() == [[0, 2]]
    assert nearest(points, centres, torch.tensor([[False, True, False]])).tolist() == [[1, 1]]


def test_two_groups_are_split_between_them():
    points, which = groups(1, 2, 15)
    side = split_in_two(points[0], 20)
    assert set(which[side].tolist()) in ({0}, {1})
    assert side.sum() == 15


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, 30), seed=st.integers(0, 999), equal=st.booleans(), outlier=st.booleans())
def test_no_side_of_a_split_is_empty_or_too_large(count, seed, equal, outlier):
    points = (
        torch.zeros(count, 3)
        if equal
        else torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    )
    if outlier:
        points[0] += 1000
    largest = (count + 1) // 2
    side = split_in_two(points, largest)
    assert 1 <= int(side.sum()) <= largest
    assert 1 <= int((~side).sum()) <= largest


def test_there_are_at_most_as_many_clusters_as_points():
    assert k_means(torch.randn(1, 3, 2), 10).max() <= 2
