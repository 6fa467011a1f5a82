"""Weights in 8 and 4 bits: their codes, and products compared with the same codes in plain float32."""

import pytest
import torch

from kvweave.ops import quantised_linear as ql

SHAPES = [(256, 640), (128, 896), (96, 33), (64, 1), (48, 2048)]


def weight_of(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.02


def rows_of(count: int, inputs: int) -> torch.Tensor:
    """Rows as language models have them: one input is far larger than the others, and some rows are."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    rows[:, inputs // 3] *= 100
    rows[0] *= 1000
    return rows


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_codes_are_within_half_a_step_and_never_overflow_in_pairs(outputs, inputs):
    weight = weight_of(outputs, inputs)
    codes, scales = ql.quantise_channels(weight)
    assert ((codes.float() * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()
    even = inputs // 2 * 2
    pairs = codes[:, 0:even:2].int() + codes[:, 1:even:2].int()
    assert int(pairs.abs().max() if pairs.numel() else 0) * 255 < 2**15


def test_large_vocabularies_are_quantised_in_parts(monkeypatch):
    weight = weight_of(100, 64)
    whole = ql.quantise_channels(weight), ql.quantise_rows_in_groups(weight)
    monkeypatch.setattr(ql, "ROW_CHUNK", 7)
    for expected, found in zip(
        whole, (ql.quantise_channels(weight), ql.quantise_rows_in_groups(weight)), strict=True
    ):
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("count", [1, 2, 32, 33, 200])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_products_are_those_of_the_codes(outputs, inputs, count):
    codes, scales = ql.quantise_channels(weight_of(outputs, inputs))
    rows = rows_of(count, inputs)
    exact = rows @ (codes.float() * scales[:, None]).T
    # Few rows have 16 bits, many rows 8, without their outliers.
    assert worst(ql.pack_int8(codes, scales).multiply(rows), exact) < (1e-3 if count <= 32 else 1.5e-2)


def test_outliers_do_not_drown_the_other_inputs():
    matrix = weight_of(128, 512)
    matrix[:, [7, 512 // 3]] = 0  # so that only the others count
    codes, scales = ql.quantise_channels(matrix)
    weight = codes.float() * scales[:, None]
    rows = rows_of(64, 512)
    rows[:, 7] = 300.0
    largest = rows.abs().amax(1, keepdim=True)
    in_8_bits = (rows / largest * 127).round() / 127 * largest  # one scale per row, outliers included
    found = ql.pack_int8(codes, scales).multiply(rows)
    assert worst(found, rows @ weight.T) < 0.1 * worst(in_8_bits @ weight.T, rows @ weight.T)


@pytest.mark.parametrize("value", [0.0, 1e-35])
def test_rows_of_nothing_give_nothing(value):
    codes, scales = ql.quantise_channels(torch.zeros(64, 64))
    for count in (1, 40):
        assert ql.pack_int8(codes, scales).multiply(torch.full((count, 64), value)).abs().max() < 1e-30


def test_extreme_codes_do_not_saturate():
    packed = ql.pack_int8(torch.full((64, 256), 64, dtype=torch.int8), torch.ones(64))
    assert torch.allclose(packed.multiply(torch.ones(2, 256)), torch.full((2, 64), 64.0 * 256))
    assert torch.allclose(packed.multiply(-torch.ones(40, 256)), torch.full((40, 64), -64.0 * 256))


def test_cpus_without_integer_kernels_compute_the_same(monkeypatch):
    codes, scales = ql.quantise_channels(weight_of(256, 640))
    packed = ql.pack_int8(codes, scales)
    monkeypatch.setattr(ql, "has_integer_kernel", lambda: False)
    monkeypatch.setattr(ql, "BLOCK_ROWS", 100)
    other = ql.pack_int8(codes, scales)
    assert type(other) is not type(packed)
    assert other.digest == packed.digest
    rows = rows_of(5, 640)
    assert worst(other.multiply(rows), rows @ (codes.float() * scales[:, None]).T) < 1e-5


@pytest.mark.parametrize("count", [1, 32, 33, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (128, 96), (320, 640)])
def test_int4_products_are_those_of_the_codes(outputs, inputs, count):
    codes, both = ql.quantise_groups(weight_of(outputs, inputs))
    assert int(codes.min()) >= 0
    assert int(codes.max()) <= 15
    scale, offset = (each.float().T.repeat_interleave(ql.GROUP, dim=1) for each in both.unbind(2))
    weight = (codes - 8) * scale + offset
    rows = rows_of(count, inputs)
    assert worst(ql.pack_int4(codes, both).multiply(rows), rows @ weight.T) < (1e-5 if count > 32 else 1e-2)


def test_int4_codes_are_near_the_weights():
    weight = weight_of(128, 256)
    codes, both = ql.quantise_groups(weight)
    scale, offset = (each.float().T.repeat_interleave(ql.GROUP, dim=1) for each in both.unbind(2))
    assert (((codes - 8) * scale + offset - weight).abs() <= 0.6 * scale + 4e-4).all()


def test_the_layout_of_4_bit_codes_is_found():
    block, order = ql.int4_layout()
    assert block in (16, 32, 64)
    assert sorted(order.tolist()) == list(range(block))


def test_an_unknown_layout_is_left_to_the_kernel(monkeypatch):
    codes, both = ql.quantise_groups(weight_of(64, 64))
    packed, rows = ql.pack_int4(codes, both), rows_of(64, 64)
    expanded = packed.multiply(rows)
    monkeypatch.setattr(ql, "int4_layout", lambda: None)
    assert worst(packed.multiply(rows), expanded) < 1e-2


def test_packing_leaves_the_quantisation_engine_alone():
    before = torch.backends.quantized.engine
    ql.pack_int8(*ql.quantise_channels(weight_of(64, 64)))
    assert torch.backends.quantized.engine == before


def test_digests_name_codes_and_scales():
    codes, scales = ql.quantise_channels(weight_of(64, 64))
    digests = {
        ql.pack_int8(codes, scales).digest,
        ql.pack_int8(codes, scales * 2).digest,
        ql.pack_int8(codes.clone().fill_(1), scales).digest,
    }
    assert len(digests) == 3
