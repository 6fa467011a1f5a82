"""Products of float32 rows with weights in 8 or 4 bits, on a CPU: what is stored of the weights, and the kernels of PyTorch that read it.

8 bits: one scale per output channel. FBGEMM's kernel (x86) multiplies in integers, for any number of rows, which are quantised
as they come, each with its own scale. A few rows are split into a coarse and a fine part of 8 bits each. Of many rows, the few
inputs with the largest outliers are multiplied in float32 (Dettmers et al., LLM.int8(), 2022): language models have inputs a hundred
times larger than the others, beside which 8 bits would leave nothing of the rest.

4 bits: scale and offset per group of inputs. A few rows go through PyTorch's kernel for such weights, which multiplies in
bfloat16; for more rows it is faster to expand the weights to float32 each time.

Each weight is held once, in the layout of its kernel.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import linear

GROUP = 32
"""Inputs that share a scale and an offset in 4 bits, as in llama.cpp's formats."""
INT4_ROWS = 64
"""Outputs of a 4-bit weight come in blocks of up to this many rows of the weight, depending on the CPU."""
OUTLIERS = 32
"""Inputs that are multiplied in float32 when there are many rows."""
_LEVELS = 127
_TINY = 1e-30
ROW_CHUNK = 8192
_FEW_ROWS = 32
"""Up to here, twice the rows cost no more than `OUTLIERS` more rows."""
_INT4_FEW_ROWS = 32
BLOCK_ROWS = 4096
"""Rows of an 8-bit weight that are expanded at a time where no integer kernel exists."""


class PackedWeight(Protocol):
    """A weight (N, K) in a kernel's layout.

    Attributes:
        digest: names codes and scales, on every CPU the same.
        bytes: what is held in memory.
    """

    @property
    def digest(self) -> str:
        """Name the values."""
        ...

    @property
    def bytes(self) -> int:
        """Count what is held."""
        ...

    def multiply(self, rows: Tensor) -> Tensor:
        """Return rows @ weight.T, (T, N), of float32 rows (T, K)."""
        ...


def quantise_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes (N, K) and float32 scales (N,) of a weight (N, K): weight ≈ codes · scales.

    The codes of two neighbouring inputs add up to at most 128: AVX2 adds the products of two neighbours in 16 bits, which
    hold 128 · 255.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs)
    for start in range(0, outputs, ROW_CHUNK):  # bounds the memory of a large vocabulary's temporary copies
        part = weight[start : start + ROW_CHUNK].detach().float()
        pairs = part[:, 0 : inputs // 2 * 2 : 2] + part[:, 1::2]
        largest = torch.maximum(_row_norms(part), _row_norms(pairs)) if inputs > 1 else _row_norms(part)
        scale = largest.div_(_LEVELS)
        scales[start : start + ROW_CHUNK] = scale[:, 0]
        codes[start : start + ROW_CHUNK] = part.div(scale).round_()
    return codes, scales


def quantise_rows_in_groups(table: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return int8 codes (V, K) and float32 scales (V, K / group) of a table (V, K), one scale per `group` numbers.

    `group` is K where it does not divide K.
    """
    rows, width = table.shape
    group = width if width % group else group
    codes = torch.empty(rows, width, dtype=torch.int8)
    scales = torch.empty(rows, width // group)
    for start in range(0, rows, ROW_CHUNK):
        part = table[start : start + ROW_CHUNK].detach().float().unflatten(1, (-1, group))
        scale = _row_norms(part).div_(_LEVELS)  # (rows, groups, 1)
        scales[start : start + ROW_CHUNK] = scale[..., 0]
        codes[start : start + ROW_CHUNK] = part.div(scale).round_().flatten(1)
    return codes, scales


def _row_norms(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each last dimension, which stays with length 1; above 0."""
    return (
        rows.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY)
    )  # several times faster than an infinity norm


def quantise_groups(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return codes 0..15 (N, K), int32, and bfloat16 scales and offsets (K / group, N, 2) of a weight (N, K).

    weight ≈ (codes − 8) · scale + offset, as PyTorch's kernel computes it. Scale and offset are rounded before the codes
    are chosen.
    """
    weight = weight.detach().float()
    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // group, group)
    low, high = groups.amin(dim=2), groups.amax(dim=2)  # (N, K / group)
    scales = ((high - low) / 15).clamp_min_(1e-12).bfloat16()
    offsets = (low + 8 * scales.float()).bfloat16()
    codes = (groups - offsets.float()[..., None]) / scales.float()[..., None] + 8
    codes = codes.round_().clamp_(0, 15).to(torch.int32).view(outputs, inputs)
    return codes, torch.stack([scales, offsets], dim=2).transpose(0, 1).contiguous()


def fits_groups(outputs: int, inputs: int, group: int = GROUP) -> bool:
    """Whether the kernel for 4 bits takes a weight of this shape."""
    return outputs % INT4_ROWS == 0 and inputs % group == 0


def has_integer_kernel() -> bool:
    """Whether this build of PyTorch has FBGEMM's kernels, as builds for x86 have."""
    return (
        "fbgemm" in torch.backends.quantized.supported_engines
        and hasattr(torch, "_make_per_channel_quantized_tensor")
        and hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
    )


def packed_bytes(outputs: int, inputs: int) -> int:
    """Return what a weight in 8 bits takes in FBGEMM's layout, which fills inputs up to a multiple of 512.

    With AVX512, the filling is allocated and mostly not touched.
    """
    return outputs * (-(-inputs // 512) * 512 + 12)


def pack_int8(codes: Tensor, scales: Tensor) -> PackedWeight:
    """Pack the result of `quantise_channels` for the fastest kernel of this CPU."""
    digest = digest_tensors(codes, scales)
    if has_integer_kernel():
        return _Int8(_prepack(codes, scales), digest, packed_bytes(*codes.shape))
    return _ExpandedInt8(codes, scales, digest, codes.numel() + 4 * codes.shape[0])


def pack_int4(codes: Tensor, scales_and_offsets: Tensor, group: int = GROUP) -> PackedWeight:
    """Pack the result of `quantise_groups` for PyTorch's kernel."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    held = packed.numel() + 2 * scales_and_offsets.numel()
    digest = digest_tensors(codes.to(torch.uint8), scales_and_offsets)
    return _Int4(packed, scales_and_offsets, group, digest, held)


def digest_tensors(*tensors: Tensor) -> str:
    """Return a digest of the tensors' shapes and bytes."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        digest.update(memoryview(numbers))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Int8:
    packed: Any
    digest: str
    bytes: int

    def multiply(self, rows: Tensor) -> Tensor:
        return self._few(rows) if rows.shape[0] <= _FEW_ROWS else self._many(rows)

    def _few(self, rows: Tensor) -> Tensor:
        """Multiply a coarse and a fine part of each row, together 16 bits."""
        count = rows.shape[0]
        step = _row_norms(rows).mul_(1.0 / _LEVELS)
        parts = torch.empty(2, count, rows.shape[1])
        coarse, fine = parts.unbind(0)
        torch.div(rows, step, out=fine)
        torch.round(fine, out=coarse)
        fine.sub_(coarse).mul_(2 * _LEVELS)
        coarse, fine = self._kernel(parts).unbind(0)
        return coarse.add_(fine, alpha=0.5 / _LEVELS).mul_(step)

    def _many(self, rows: Tensor) -> Tensor:
        """Multiply the inputs with outliers in float32, the others of each row in 8 bits."""
        count, width = rows.shape
        outliers = min(OUTLIERS, width)
        # Outliers are large beside their row: without its length, the rows with the largest values would choose alone.
        sizes = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(_TINY)
        magnitudes = torch.div(rows, sizes).abs_()
        chosen = magnitudes.amax(0).topk(outliers, sorted=False).indices
        largest = magnitudes.index_fill_(1, chosen, 0.0).amax(1, keepdim=True).mul_(sizes).clamp_min_(_TINY)
        parts = torch.empty(count + outliers, width)
        torch.mul(rows, _LEVELS / largest, out=parts[:count]).index_fill_(1, chosen, 0.0)
        # A row with a single 1 reads an input's weights out of the packed ones, exactly.
        parts[count:] = 0.0
        parts[torch.arange(count, count + outliers), chosen] = 1.0
        product = self._kernel(parts)
        exact = rows.index_select(1, chosen)
        return product[:count].mul_(largest / _LEVELS).addmm_(exact, product[count:])

    def _kernel(self, rows: Tensor) -> Tensor:
        """Return the product with rows in [-127, 127], rounded to whole numbers."""
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1.0, _LEVELS + 1, self.packed
        )
        return product


@dataclass(frozen=True, slots=True)
class _ExpandedInt8:
    """For CPUs without integer kernels: expands the weight to float32 each time, in blocks."""

    codes: Tensor
    scales: Tensor
    digest: str
    bytes: int

    def multiply(self, rows: Tensor) -> Tensor:
        blocks = [linear(rows, block.float()) for block in self.codes.split(BLOCK_ROWS)]
        return torch.cat(blocks, dim=1).mul_(self.scales)


@dataclass(frozen=True, slots=True)
class _Int4:
    packed: Tensor
    scales_and_offsets: Tensor
    group: int
    digest: str
    bytes: int

    def multiply(self, rows: Tensor) -> Tensor:
        if rows.shape[0] > _INT4_FEW_ROWS and int4_layout() is not None:
            return linear(rows, self.expanded())
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.bfloat16(), self.packed, self.group, self.scales_and_offsets
        )
        return product.float()

    def expanded(self) -> Tensor:
        """Return the weight in float32, (N, K)."""
        layout = int4_layout()
        assert layout is not None
        outputs, inputs = self.scales_and_offsets.shape[1], self.scales_and_offsets.shape[0] * self.group
        block, order = layout
        bytes_ = self.packed.view(outputs // block, inputs, block // 2)
        codes = torch.cat([bytes_ & 15, bytes_ >> 4], dim=2)  # (blocks, K, block)
        weight = torch.empty(outputs // block, block, inputs // self.group, self.group)
        weight.view(outputs // block, block, inputs).copy_(codes[..., order].transpose(1, 2))
        scales, offsets = self.scales_and_offsets.float().permute(2, 1, 0).unbind(0)  # (N, groups)
        weight = weight.view(outputs, -1, self.group)
        weight.mul_(scales[..., None]).add_((offsets - 8 * scales)[..., None])
        return weight.view(outputs, inputs)


@cache
def int4_layout() -> tuple[int, Tensor] | None:
    """Return how this CPU's kernel packs 4-bit codes: rows per block, and each row's place among a block's nibbles.

    The layout is PyTorch's own and depends on the CPU's vectors, so it is read off packed numbers. None if it is not blocks of
    rows, and in them for each input the low and high halves of bytes.
    """
    rows = torch.arange(INT4_ROWS, dtype=torch.int32)[:, None].expand(INT4_ROWS, GROUP)
    inputs = torch.arange(GROUP, dtype=torch.int32)[None].expand(INT4_ROWS, GROUP)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    # Two hexadecimal digits of each code's row and input, one nibble at a time.
    digits = [pack((each >> shift & 15).contiguous(), 1).int() for each in (rows, inputs) for shift in (0, 4)]
    for block in (64, 32, 16):
        shaped = [digit.view(INT4_ROWS // block, GROUP, block // 2) for digit in digits]
        halves = [torch.cat([each & 15, each >> 4], dim=2) for each in shaped]
        row, column = halves[0] + 16 * halves[1], halves[2] + 16 * halves[3]
        first = row[0, 0]
        expected = first + block * torch.arange(INT4_ROWS // block)[:, None, None]
        if (row == expected).all() and (column == torch.arange(GROUP)[None, :, None]).all():
            return block, torch.argsort(first)
    return None


def _prepack(codes: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(codes.shape[0], dtype=torch.int64)
    # PyTorch announces that tensors of this kind will go one day; `has_integer_kernel` looks for them.
    with _engine("fbgemm"), warnings.catch_warnings(action="ignore", category=UserWarning):
        quantised = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """Choose the engine that packs: the packed weight's kernel is that engine's from then on."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
