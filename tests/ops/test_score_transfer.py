import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops.scores import transfer_lowest

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
