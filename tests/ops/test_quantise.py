"""Quantised KV against the definition in the module's docstring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.ops.quantise import BITS, all_finite, find_outliers, quantise, quantised_bytes
from kvweave.types import ChunkKV, Storage
from support.definitions import dequantise_reference

STORAGES: list[Storage] = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kv_of(
    layers: int = 2, heads: int = 2, tokens: int = 9, width: int = 6, seed: int = 0, spread: float = 1.0
) -> Tensor:
    """Return (L, 2, G, S, D); every channel of the keys has its own mean and spread, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, heads, tokens, width, generator=generator)
    channels = torch.randn(layers, 1, heads, 1, width, generator=generator)
    kv[:, :1] = kv[:, :1] * channels.exp() + 10 * channels
    return kv * spread


shapes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 140), st.integers(1, 7))


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    storage=st.sampled_from(STORAGES),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_errors_are_at_most_half_a_step_and_outliers_are_exact(
    shape: tuple[int, int, int, int], dtype: torch.dtype, storage: Storage, seed: int, spread: float
) -> None:
    kv = kv_of(*shape, seed=seed, spread=spread).to(dtype)
    packed = quantise(kv, storage)
    decoded = packed.all_layers()
    assert decoded.dtype == packed.dtype == dtype
    assert decoded.shape == packed.shape == kv.shape
    layers, parts, heads, tokens, width = kv.shape
    assert packed.nbytes == quantised_bytes((layers, parts, heads, tokens, width), dtype, storage)
    steps = torch.stack(
        torch.broadcast_tensors(packed.key_step.expand(kv[:, 0].shape), packed.value_step.float()), dim=1
    )  # (L, 2, G, S, D)
    off = (decoded.double() - kv.double()).abs()
    rounding = torch.finfo(dtype).eps * decoded.double().abs() + 2 * torch.finfo(torch.float32).eps * kv.abs()
    assert (off <= steps.double() / 2 * (1 + 1e-5) + rounding + torch.finfo(dtype).tiny).all()
    for layer, tokens in enumerate(packed.outlier_tokens.long()):
        assert torch.equal(decoded[layer, :, :, tokens], kv[layer, :, :, tokens])


@pytest.mark.parametrize("storage", STORAGES)
def test_steps_are_no_larger_than_the_ranges_need(storage: Storage) -> None:
    kv = kv_of(tokens=200)
    packed = quantise(kv, storage)
    levels = 2 ** BITS[storage] - 1
    for layer in range(2):
        kept = torch.ones(200, dtype=torch.bool)
        kept[packed.outlier_tokens[layer].long()] = False
        keys, values = kv[layer, 0][:, kept], kv[layer, 1][:, kept]
        asked = (keys.amax(1) - keys.amin(1)) / levels
        torch.testing.assert_close(packed.key_step[layer, :, 0], asked)
        asked = (values.amax(2) - values.amin(2)) / levels
        steps = packed.value_step[layer, :, kept, 0].float()
        assert (steps >= asked).all()
        assert (steps <= asked * (1 + 2**-5)).all()  # bfloat16, rounded outwards at both ends


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 6), st.integers(1, 5)),
    dtype=st.sampled_from(DTYPES),
    storage=st.sampled_from(STORAGES),
)
def test_decoding_is_the_definition(
    shape: tuple[int, int, int, int], dtype: torch.dtype, storage: Storage
) -> None:
    packed = quantise(kv_of(*shape).to(dtype), storage)
    whole = packed.all_layers()
    for layer in range(shape[0]):
        assert torch.equal(packed.layer(layer), whole[layer])
        torch.testing.assert_close(packed.layer(layer), dequantise_reference(packed, layer))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_constant_channel_is_decoded_exactly(storage: Storage) -> None:
    kv = kv_of(tokens=20)
    kv[:, 0, :, :, 2] = 0.1
    kv[:, 1, :, 3] = -3.0
    decoded = quantise(kv, storage).all_layers()
    assert (decoded[:, 0, :, :, 2] == kv[0, 0, 0, 0, 2]).all()
    assert (decoded[:, 1, :, 3] == -3.0).all()


def test_the_farthest_outliers_are_stored_exactly() -> None:
    kv = kv_of(layers=2, tokens=300)
    sinks = [[0, 17, 299], [5, 6, 250]]
    for layer, tokens in enumerate(sinks):
        kv[layer, 0, :, tokens] += 50 * kv[layer, 0].std(dim=1, keepdim=True)
    assert find_outliers(kv).tolist() == sinks
    decoded = quantise(kv, "int4").all_layers()
    for layer, tokens in enumerate(sinks):
        others = [token for token in range(300) if token not in tokens]
        keys = kv[layer, 0][:, others]  # (G, S, D), those in the ranges
        half_step = (keys.amax(dim=1, keepdim=True) - keys.amin(dim=1, keepdim=True)) / 15 / 2
        assert ((decoded[layer, 0][:, others] - keys).abs() <= half_step * (1 + 1e-3)).all()
        assert torch.equal(decoded[layer, :, :, tokens], kv[layer, :, :, tokens])


@pytest.mark.parametrize(
    ("heads", "width"), [(2, 64), (8, 128), (4, 128), (8, 64)], ids=["0.5B", "8B", "7B", "1B"]
)
@pytest.mark.parametrize("tokens", [96, 128, 512, 2048])
def test_sizes(heads: int, width: int, tokens: int) -> None:
    """The documented sizes hold for the shapes of real models."""
    kv = torch.randn(1, 2, heads, tokens, width)
    for storage, of_16_bits, of_float32 in (("int8", 0.55, 0.28), ("int4", 0.32, 0.16)):
        for dtype in (torch.bfloat16, torch.float16):
            packed = ChunkKV(tuple(range(tokens)), quantise(kv.to(dtype), storage))  # type: ignore[arg-type]
            assert packed.bytes <= of_16_bits * kv.to(dtype).nbytes
        assert quantise(kv, storage).nbytes <= of_float32 * kv.nbytes  # type: ignore[arg-type]


def test_numbers_that_are_not_finite() -> None:
    for number in (torch.inf, -torch.inf, torch.nan):
        kv = kv_of(tokens=20)
        kv[0, 0, 1, 7, 2] = number
        with pytest.raises(
            InvalidRequest, match="KV of NaN, infinity or too large numbers cannot be coded as int8"
        ):
            quantise(kv, "int8")


def test_large_numbers_are_finite() -> None:
    """Their sum overflows, and they do not."""
    assert all_finite(torch.full((100,), 3e38))
    assert not all_finite(torch.tensor([3e38, 3e38, torch.inf]))
    assert all_finite(torch.full((100,), 6e4, dtype=torch.float16))
    assert not all_finite(torch.tensor([1.0, torch.nan], dtype=torch.bfloat16))


def test_other_storages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be coded as exact; choose one of int8, int4"):
        quantise(kv_of(), "exact")


def test_the_input_is_neither_changed_nor_referenced() -> None:
    kv = kv_of(tokens=20)
    before = kv.clone()
    packed = quantise(kv, "int8")
    decoded = packed.all_layers()
    assert torch.equal(kv, before)
    kv.zero_()
    decoded.zero_()
    assert torch.equal(packed.all_layers(), quantise(before, "int8").all_layers())
