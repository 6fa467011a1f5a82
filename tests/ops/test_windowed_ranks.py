import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops.scores import windowed_ranks


def kept(scores: list[int], lengths: list[int], count: int, window: int, more_than: int) -> set[int]:
    """CacheClip §3.3, written out."""
    best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count]
    found: set[int] = set()
    start = 0
    for length in lengths:
        for first in range(start, start + length, window):
            inside = [t for t in best if first <= t < min(first + window, start + length)]
            if len(inside) > more_than:
                found.update(inside)
        start += length
    return found


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(0, 11), max_size=4))
    window = draw(st.integers(1, 5))
    scores = draw(st.lists(st.integers(0, 6), min_size=sum(lengths), max_size=sum(lengths)))
    return scores, lengths, window, draw(st.integers(0, window - 1))


@settings(deadline=None)
@given(cases())
def test_ranks_give_the_kept_tokens_of_every_selection(case):
    scores, lengths, window, more_than = case
    found = windowed_ranks(torch.tensor(scores).float(), lengths, window=window, more_than=more_than)
    for count in range(len(scores) + 1):
        assert set((found <= count).nonzero().flatten().tolist()) == kept(
            scores, lengths, count, window, more_than
        )


@settings(deadline=None)
@given(cases())
def test_tokens_that_no_selection_keeps_come_last_by_score(case):
    scores, lengths, window, more_than = case
    found = windowed_ranks(torch.tensor(scores).float(), lengths, window=window, more_than=more_than)
    never = [token for token in range(len(scores)) if found[token] > len(scores)]
    assert sorted(never, key=lambda t: int(found[t])) == sorted(never, key=lambda t: (-scores[t], t))


def test_windows_of_one_are_the_selection_itself():
    scores = torch.tensor([0.1, 0.5, 0.3])
    assert windowed_ranks(scores, [3], window=1, more_than=0).tolist() == [3, 1, 2]
