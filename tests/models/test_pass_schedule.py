"""In which order requests that wait get rows: with passes that take made-up times, and no model."""

import random
from itertools import pairwise

import pytest
import torch

from kvweave.models.attention import RowPlan
from kvweave.models.pass_schedule import LEAST_PIECE, PassRows, PassSchedule, WaitingPass


def rows(count, *, reply=False, in_pieces=True):
    ids = torch.arange(count)
    passed = PassRows(None, ids, ids, RowPlan(ids, torch.float32), appends=reply)
    return WaitingPass(passed, in_pieces=in_pieces and not reply)


def alone():
    return WaitingPass(None, lambda: None)


class Passes:
    """Runs what a schedule chooses; a packed pass takes `row_s` for each row. `order` is what ended, pass by pass."""

    def __init__(self, *waiting, row_s=0.1):
        self.waiting, self.schedule, self.row_s = list(waiting), PassSchedule(), row_s
        self.packed, self.order = 0, []

    def run(self, *arrived):
        """Run one pass, after which others arrive; return the rows of each request in it."""
        batch = self.schedule.choose(self.waiting)
        ran = {each: 0 if piece is None else piece.ids.numel() for each, piece in batch}
        if any(ran.values()):
            self.packed += 1
            self.schedule.record(sum(ran.values()), self.row_s * sum(ran.values()))
        for each, count in ran.items():
            each.done += count
        ended = [each for each in ran if not each.left]
        self.waiting = [each for each in self.waiting if each not in ended] + list(arrived)
        self.order += ended
        return ran


@pytest.mark.parametrize("row_s", [0.1, 0.001])
def test_an_old_prompt_gets_rows_in_every_pass_beside_many_replies_and_ever_new_short_prompts(row_s):
    """Also where the replies alone fill a pass."""
    old, replies = rows(1000), [rows(9, reply=True) for _ in range(12)]
    passes = Passes(old, *replies, row_s=row_s)
    while old.left:
        left = old.left
        ran = passes.run(rows(40), rows(3), *(rows(9, reply=True) for _ in replies))
        assert ran[old] >= min(LEAST_PIECE, left)
        assert sum(each.appends for each in ran) == len(replies)  # and nobody's next token waits
    assert passes.packed <= -(-1000 // LEAST_PIECE)


def test_a_prompt_is_done_within_the_bound_whatever_comes_after_it():
    chance = random.Random(0)
    before = [rows(chance.randrange(1, 900), in_pieces=chance.random() < 0.8) for _ in range(15)]
    bound = sum(each.left / LEAST_PIECE + 1 for each in before)
    passes, last = Passes(*before), before[-1]
    while last not in passes.order:
        passes.run(*(rows(chance.randrange(1, 900)) for _ in range(3)))
    assert passes.packed <= bound
    firsts = [passes.order.index(each) for each in before if each in passes.order]
    assert len(firsts) == len(before), "a prompt that came before was passed over"


def test_passes_alone_and_packed_ones_take_turns_in_their_order():
    calls = [alone() for _ in range(4)]
    passes = Passes(*calls, rows(2000))
    kinds = [next(iter(passes.run(alone(), rows(50)))).alone is not None for _ in range(8)]
    assert all(one != other for one, other in pairwise(kinds))
    assert [each for each in passes.order if each.alone is not None] == calls


def test_only_the_first_prompt_makes_a_pass_longer_than_it_should_be():
    whole = rows(3000, in_pieces=False)
    passes = Passes(rows(200), whole, row_s=0.01)
    passes.schedule.record(100, 1.0)
    while whole not in (ran := passes.run()):
        assert sum(ran.values()) <= 100
    assert ran == {whole: 3000}


def test_what_was_given_up_ends_before_anything_runs():
    gone = WaitingPass(rows(500).rows, in_pieces=True, cancelled=lambda: True)
    assert PassSchedule().choose([rows(10), gone]) == [(gone, None)]
