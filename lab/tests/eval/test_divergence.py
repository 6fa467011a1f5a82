"""Divergence is Kullback and Leibler's."""

import math

import pytest
import torch

from kvweave_lab.eval.divergence import divergence


def test_divergence_is_zero_for_equal_distributions_whatever_their_offset():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits + 3) == pytest.approx(0, abs=1e-12)


def test_divergence_is_in_nats_from_the_first_to_the_second():
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergence(half, quarter) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence(quarter, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
