import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops.scores import transfer_lowest, transfer_scores

CHARACTERS = 12


@st.composite
def tokens(draw):
    """Offsets of tokens, in order; some characters have no token, others several."""
    starts = sorted(draw(st.lists(st.integers(0, CHARACTERS - 1), max_size=8)))
    return [(start, min(CHARACTERS, start + draw(st.integers(1, 4)))) for start in starts]


@settings(deadline=None)
@given(source=tokens(), target=tokens(), data=st.data())
def test_a_token_gets_the_lowest_value_of_those_it_shares_a_character_with(source, target, data):
    values = [data.draw(st.integers(0, 20)) for _ in source]
    found = transfer_lowest(torch.tensor(values, dtype=torch.long), source, target, CHARACTERS, otherwise=99)
    assert found.tolist() == [
        min([v for v, (a, b) in zip(values, source, strict=True) if a < end and start < b], default=99)
        for start, end in target
    ]


def test_a_token_without_characters_counts_with_the_next_one():
    assert transfer_lowest(
        torch.tensor([3, 5]), [(0, 2), (2, 4)], [(2, 2), (0, 1)], 4, otherwise=9
    ).tolist() == [5, 3]


def test_scores_are_split_over_characters():
    got = transfer_scores(torch.tensor([1.0, 2.0]), [(0, 2), (2, 4)], [(0, 1), (1, 4)], 4)
    assert got.tolist() == [0.5, 2.5]


def test_tokens_that_share_a_character_share_its_score():
    got = transfer_scores(torch.tensor([1.0, 2.0]), [(0, 1), (1, 3)], [(0, 1), (0, 1), (1, 3)], 3)
    assert got.tolist() == [0.5, 0.5, 2.0]


def test_tokens_without_characters_lose_nothing():
    got = transfer_scores(torch.tensor([1.0, 2.0, 4.0]), [(0, 0), (0, 2), (2, 2)], [(0, 1), (1, 2)], 2)
    assert got.sum().item() == pytest.approx(7)
