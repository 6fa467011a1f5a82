"""Quantised rows: the error is at most half a step of the group's scale."""

import pytest
import torch

from kvweave.ops.quantise import dequantise_rows, quantise_rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_rounding_errors_are_at_most_half_a_step(bits, size):
    x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0)) * size
    codes, scales = quantise_rows(x, bits, 32)
    assert codes.shape == (7, 3, 64 * bits // 8)
    back = dequantise_rows(codes, scales, bits, torch.float32)
    step = scales.float().repeat_interleave(32, -1)
    assert ((back - x).abs() <= step * 0.5001).all()
    assert (
        step
        <= x.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1) / (2 ** (bits - 1) - 1) * 1.01
    ).all()


def test_zeros_stay_zeros():
    codes, scales = quantise_rows(torch.zeros(2, 32), 8, 32)
    assert torch.equal(
        dequantise_rows(codes, scales, 8, torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_each_row_is_quantised_on_its_own(bits):
    """So rows can be written one at a time."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1], [9], [50], [0]]
    )
    codes, scales = quantise_rows(x, bits, 32)
    for row in range(5):
        alone = quantise_rows(x[row], bits, 32)
        assert torch.equal(codes[row], alone[0])
        assert torch.equal(scales[row], alone[1])
